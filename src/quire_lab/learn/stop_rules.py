"""What ends an answer: Quill's text under every rule at once, and where each rule alone would have ended it."""

from __future__ import annotations

from typing import Any

from quire.request import SamplingParams
from quire_lab.learn.picture import Axis, Cell, Fact, Facts, Grid, Picture, Row, Span, Table, Timeline
from quire_lab.learn.simulation import Simulation, choice, number, text

_MOST = 96  # tokens that are generated where no rule ends the text sooner
_SHOWN = 12  # tokens of a row of the grid


def draw(prompt: str, max_tokens: int, stop: str, stop_token: str, end_of_text: str, seed: int) -> Picture:
    """Return the end by each rule alone and by all together, from the engine's own answers."""
    from quire_lab.learn.quill import answer, ids_of

    # Where the model's end of text is ignored the text goes on behind it, so all rules see one text.
    base: dict[str, Any] = {"temperature": 0.8, "seed": seed, "max_tokens": _MOST, "ignore_eos": True}
    first_id = ids_of(stop_token)[-1:] if stop_token else []
    alone: dict[str, dict[str, Any] | None] = {
        "max_tokens": {"max_tokens": max_tokens},
        "stop string": {"stop": stop} if stop else None,
        "stop token": {"stop_token_ids": first_id} if first_id else None,
        "end of text": {"ignore_eos": False} if end_of_text == "on" else None,
    }
    used = {name: rule for name, rule in alone.items() if rule is not None}
    together = base | {key: value for rule in used.values() for key, value in rule.items()}
    ends = {name: answer(prompt or " ", SamplingParams(**base | rule)) for name, rule in used.items()}
    final = answer(prompt or " ", SamplingParams(**together))
    unstopped = answer(prompt or " ", SamplingParams(**base | {"max_tokens": len(final.words) + _SHOWN}))
    first = min(ends, key=lambda name: len(ends[name].words))
    rows = tuple(
        (name, len(one.words), one.reason, repr(one.text[-24:]))
        for name, one in (*ends.items(), ("all rules", final))
    )
    spans = tuple(Row(name, (Span(0.0, float(len(one.words)), "decode"),)) for name, one in ends.items())
    spans += (Row("all rules", (Span(0.0, float(len(final.words)), "decode"),)),)
    num_kept = len(final.words)
    cells = [
        Cell("kept" if i < num_kept else "waste", repr(word)[1:-1]) for i, word in enumerate(unstopped.words)
    ]
    grid = Grid("tokens that were generated, and those that would have followed",
                tuple(tuple(cells[i : i + _SHOWN]) for i in range(0, len(cells), _SHOWN)))  # fmt: skip
    facts = (
        Fact("the rule that ends first", first),
        Fact("tokens by all rules", len(final.words)),
        Fact("finish_reason", final.reason),
        Fact("text", final.text),
    )
    parts = (
        Timeline("tokens until each rule alone ends the text", Axis("output tokens"), spans),
        Table("", ("rule", "tokens", "finish_reason", "the text ends with"), rows),
        grid,
        Facts("", facts),
    )
    return Picture(f"Quill continues {prompt!r}", parts)


SIMULATION = Simulation(
    "stop-rules",
    "What ends an answer",
    "A length, a string, a token or the model's own end of text: the first rule that holds ends an answer.",
    (
        text("prompt", "prompt", "It was a dark and"),
        number("max_tokens", "max_tokens", 60, 1, _MOST),
        text("stop", "stop string (empty: none)", "She"),
        text("stop_token", "stop token, as a text of one token (empty: none)", ""),
        choice("end_of_text", "the model's end of text", "on", ("on", "off")),
        number("seed", "seed", 7, 0, 10000),
    ),
    draw,
)

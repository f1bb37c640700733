"""The decode loop of Quill, token by token: the model's distribution, with temperature, and after truncation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.request import SamplingParams
from quire_lab.learn.picture import Axis, Bars, Fact, Facts, Line, Lines, Part, Picture, Table
from quire_lab.learn.simulation import Simulation, number, text

if TYPE_CHECKING:
    from quire_lab.learn.quill import Sampled

_SHOWN = 8  # most likely tokens of the step that is looked at


def draw(
    prompt: str, tokens: int, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, step: int
) -> Picture:
    """Return the steps of one generation, and the distributions of step ``step``."""
    from quire_lab.learn.quill import decode, spelled

    sampling = SamplingParams(
        max_tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        ignore_eos=True,
    )
    answer, steps = decode(prompt or " ", sampling)
    rows = []
    for number_, one in enumerate(steps):
        of = [float(distribution[one.token_id]) * 100 for distribution in (one.model, one.warm, one.kept)]
        rows.append((f"{number_} {one.text!r}", one.token_id, *of, _rank(one), int((one.kept > 0).sum())))
    header = (
        "step and token",
        "id",
        "model, %",
        "with temperature, %",
        "after truncation, %",
        "rank",
        "ids kept",
    )
    at = steps[min(step, len(steps) - 1)]
    best = at.model.topk(min(_SHOWN, at.model.shape[0]))
    ids = best.indices.tolist()
    bars = {
        name: tuple(float(of[i]) * 100 for i in ids)
        for name, of in (("model", at.model), ("temperature", at.warm), ("truncation", at.kept))
    }
    names = tuple(repr(piece) for piece in spelled(ids))
    xs = tuple(float(i) for i in range(len(steps)))
    entropy = Lines("uncertainty of each step", Axis("step"), Axis("entropy", "bits"), (
        Line("model", xs, tuple(_entropy(s, "model") for s in steps), "points"),
        Line("what is sampled from", xs, tuple(_entropy(s, "kept") for s in steps), "points"),
    ))  # fmt: skip
    facts = (
        Fact("text", answer),
        Fact("decode steps, each of which reads all weights", len(steps)),
        Fact("probability of the whole text by the model", _product(steps)),
    )
    title = f"step {min(step, len(steps) - 1)}, sampled {at.text!r}"
    parts: tuple[Part, ...] = (
        Bars(title, Axis("probability", "%"), names, bars), Table("", header, tuple(rows)), entropy, Facts("", facts)
    )  # fmt: skip
    return Picture(f"Quill continues {prompt!r}", parts)


def _rank(one: Sampled) -> int:
    return int((one.model > one.model[one.token_id]).sum()) + 1


def _entropy(one: Sampled, name: str) -> float:
    p = getattr(one, name)
    return -float((p * p.clamp_min(1e-300).log2()).sum()) + 0.0


def _product(steps: list[Sampled]) -> float:
    product = 1.0
    for one in steps:
        product *= float(one.model[one.token_id])
    return product


SIMULATION = Simulation(
    "decode-loop",
    "The decode loop",
    "Each step gives a probability for every token; temperature, top-k, top-p and min-p shape what is sampled from.",
    (
        text("prompt", "prompt", "It was a dark and"),
        number("tokens", "tokens to generate", 12, 1, 64),
        number("temperature", "temperature (0: greedy)", 0.8, 0.0, 2.0, 0.05),
        number("top_k", "top-k (0: off)", 0, 0, 200),
        number("top_p", "top-p", 0.9, 0.01, 1.0, 0.01),
        number("min_p", "min-p", 0.0, 0.0, 1.0, 0.01),
        number("seed", "seed", 7, 0, 10000),
        number("step", "step to look at", 0, 0, 63),
    ),
    draw,
)

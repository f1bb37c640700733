"""Speculative decoding round by round: Quill verifies what a smaller model, or its own prompt, proposes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.request import SamplingParams
from quire_lab.learn.picture import Axis, Cell, Fact, Facts, Grid, Line, Lines, Picture
from quire_lab.learn.simulation import Simulation, choice, number, text
from quire_lab.sim.drafts import Speculation

if TYPE_CHECKING:
    from quire_lab.learn.quill import Round

_PROPOSERS = {"quill-draft": "quill-draft", "n-grams of the text": "ngram"}


def draw(
    prompt: str, tokens: int, drafts: int, proposer: str, temperature: float, seed: int, draft_cost: float,
    alpha: float,
) -> Picture:  # fmt: skip
    """Return the rounds of one generation, and what theory says at its rate of acceptance."""
    from quire_lab.learn.quill import speculate

    sampling = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True)
    answer, rounds = speculate(prompt or " ", sampling, _PROPOSERS[proposer], drafts)
    tried, accepted = _counts(rounds)
    measured = accepted / tried if tried else 0.0
    assumed = alpha if alpha > 0.0 else measured
    theory = Speculation((assumed,), drafts, draft_cost)
    verified = [r for r in rounds if r.drafts]
    per_round = tokens / len(rounds)
    facts = (
        Fact("text", answer),
        Fact("steps of the large model", len(rounds)),
        Fact("tokens", tokens),
        Fact("tokens per step", per_round),
        Fact("acceptance of a draft that is reached, α", measured),
        Fact("tokens per round with drafts", _mean([1 + r.num_accepted for r in verified])),
        Fact(f"by theory at α = {assumed:.2g}, (1 − α^{drafts + 1}) / (1 − α)", theory.tokens_per_round),
        Fact(f"speed-up by theory with drafts that cost {draft_cost:g} of a step each", theory.speedup, "×"),
        Fact("drafts per round with the best speed-up at this α", _best_drafts(assumed, draft_cost)),
    )
    counts = tuple(range(1, 17))
    curves = tuple(
        Line(
            f"α = {a:.2g}",
            tuple(map(float, counts)),
            tuple(Speculation((a,), n, draft_cost).speedup for n in counts),
        )
        for a in dict.fromkeys((0.5, 0.7, 0.9, round(assumed, 2)))
    )
    chart = Lines("by theory", Axis("drafts per round"), Axis("speed-up", "×"), curves)
    alphas = tuple(i / 50 for i in range(50))
    by_alpha = tuple(
        Line(f"{n} drafts", alphas, tuple(Speculation((a,), n, draft_cost).tokens_per_round for a in alphas))
        for n in dict.fromkeys((1, drafts, 8))
    )
    of_alpha = Lines("tokens of a round by acceptance", Axis("α"), Axis("tokens of a round"), by_alpha,
                     marks=((assumed, "α"),))  # fmt: skip
    title = "rounds: drafts that were accepted, rejected, and the token that the large model adds"
    names = tuple(f"round {n}" for n in range(len(rounds)))
    grid = Grid(title, tuple(_cells(r) for r in rounds), names)
    return Picture(f"Quill with {proposer}", (grid, chart, of_alpha, Facts("", facts)))


def _best_drafts(alpha: float, draft_cost: float) -> int:
    return max(range(1, 17), key=lambda n: Speculation((alpha,), n, draft_cost).speedup)


def _cells(one: Round) -> tuple[Cell, ...]:
    drafts = (
        Cell("accepted" if place < one.num_accepted else "waste", repr(word)[1:-1])
        for place, word in enumerate(one.drafts)
    )
    return (*drafts, Cell("added by the model", repr(one.next_token)[1:-1]))


def _counts(rounds: list[Round]) -> tuple[int, int]:
    """Return the drafts that were reached (up to the first rejected one), and those that were accepted."""
    accepted = sum(r.num_accepted for r in rounds)
    return accepted + sum(r.num_accepted < len(r.drafts) for r in rounds), accepted


def _mean(values: list[int]) -> float:
    return sum(values) / len(values) if values else 1.0


SIMULATION = Simulation(
    "speculation",
    "Speculative decoding",
    "A round verifies several drafts with one reading of the weights; the first rejected draft ends it.",
    (
        text("prompt", "prompt", "It was a dark and"),
        number("tokens", "tokens to generate", 32, 2, 128),
        number("drafts", "drafts per round, γ", 4, 1, 16),
        choice("proposer", "proposer", "quill-draft", tuple(_PROPOSERS)),
        number("temperature", "temperature (0: greedy)", 0.0, 0.0, 2.0, 0.05),
        number("seed", "seed", 7, 0, 10000),
        number("draft_cost", "cost of a draft, in decode steps", 0.05, 0.0, 1.0, 0.01),
        number("alpha", "acceptance α of the theory (0: as measured)", 0.0, 0.0, 0.99, 0.01),
    ),
    draw,
)

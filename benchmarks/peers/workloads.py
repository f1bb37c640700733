"""The workloads, once for all engines: prompts are token ids, output is greedy and never ends early.

    A  one stream: 512 tokens in, 128 out
    B  32 requests at once, 128 in, 128 out each
    C  16 requests at once that share 1,024 tokens of prompt, 32 of their own each, 32 out; the prefix is new each round
    D  B with output lengths uniform in 8…256 and Poisson arrivals at a given rate

Every round draws new prompts, so that no cache of an earlier one helps; the same round is the same for all engines.
Standard library only: this file runs in the environment of every engine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# Ids that are ordinary tokens in every vocabulary we make.
FIRST_ID, LAST_ID = 300, 15000
NAMES = ("A", "B", "C", "D")
MAX_CONTEXT = 2048
D_LENGTHS = (8, 256)
D_MEAN_LENGTH = sum(D_LENGTHS) / 2


@dataclass(frozen=True)
class Item:
    """One request: ``arrival_s`` counts from the start of the workload."""

    prompt: list[int]
    output: int
    arrival_s: float = 0.0


def tokens(count: int, *seed: object) -> list[int]:
    rng = random.Random(repr(seed))
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(count)]


def make(name: str, round_: int, rate: float = 0.0) -> list[Item]:
    """Return the requests of workload ``name``. ``rate``: requests a second, for D."""
    if name == "A":
        return [Item(tokens(512, name, round_), 128)]
    if name == "B":
        return [Item(tokens(128, name, round_, i), 128) for i in range(32)]
    if name == "C":
        shared = tokens(1024, name, round_)
        return [Item(shared + tokens(32, name, round_, i), 32) for i in range(16)]
    assert name == "D", f"workload {name!r}; there are {NAMES}"
    assert rate > 0
    rng = random.Random(repr((name, round_)))
    arrival_s, items = 0.0, []
    for i in range(32):
        items.append(Item(tokens(128, name, round_, i), rng.randint(*D_LENGTHS), arrival_s))
        arrival_s += rng.expovariate(rate)
    return items


def warm_up() -> list[Item]:
    """A batch as wide as B, short: compiled code, buffers and threads are there before the clock starts."""
    return [Item(tokens(16, "warm", i), 4) for i in range(32)]


def long_warm_up() -> list[Item]:
    """One prompt as long as A's."""
    return [Item(tokens(512, "warm long"), 4)]

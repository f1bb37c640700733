"""The planted faults of `tools/mutants.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replace ``old`` by ``new`` in ``file``; one of ``tests`` (pytest arguments) must then fail."""

    name: str
    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    count: int = 1  # how often ``old`` occurs


SAMPLER = ("tests/sampling/test_sampler.py",)

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "rng-without-sample-index",
        "the RNG does not know which of n samples it draws for",
        "src/quire/sampling/batch.py",
        "        seq.sample_index,\n",
        "        0,\n",
        SAMPLER,
    ),
    Mutant(
        "rng-without-position",
        "the RNG gives the same noise at every position",
        "src/quire/sampling/batch.py",
        "        len(seq.prompt_token_ids) + len(seq.output_token_ids),\n",
        "        0,\n",
        SAMPLER,
    ),
)

"""The control of drafts against machines of known step times, quiet and busy, next to the best fixed number of drafts.

A busy machine holds up a share of the steps, each for some multiple of its time. A case is a kind of step, a number of
sequences, an acceptance and a cost per draft; the first steps are not counted, so that the control has learned them.

    python benchmarks/draft_control.py [--busy SHARE:TIMES …] [--steps 1000] [--first 300]
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.speculate.test_draft_control import (
    Machine,
    StepSeconds,
    compute_bound,
    control,
    edits_code,
    fixed_rates,
    in_tiles,
    memory_bound,
)

STEPS = (memory_bound, compute_bound, in_tiles, edits_code)
BATCHES = (1, 4, 16)
ALPHAS = (0.05, 0.3, 0.6, 0.8, 0.95)
DRAFT_S = (0.0, 0.3e-3, 1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--busy", nargs="*", default=["0:1", "0.1:2.5", "0.2:2.5"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--first", type=int, default=300, help="steps before those that count")
    args = parser.parse_args()
    print(
        "| steps held up | cases | of the best: mean | least | of plain: least | first steps, of the best: mean |"
    )
    print("|---|---|---|---|---|---|")
    for busy in args.busy:
        share, times = map(float, busy.split(":"))
        rows = [measure(*case, (share, times), args.first, args.steps) for case in cases()]
        best, plain, first = zip(*rows, strict=True)
        print(
            f"| {share:.0%} take {times:g} times as long | {len(rows)} | {mean(best):.3f} | {min(best):.3f} | "
            f"{min(plain):.3f} | {mean(first):.3f} |"
        )


def cases() -> list[tuple[StepSeconds, int, float, float]]:
    return list(product(STEPS, BATCHES, ALPHAS, DRAFT_S))


def measure(
    seconds: StepSeconds,
    num_seqs: int,
    alpha: float,
    draft_s: float,
    busy: tuple[float, float],
    first: int,
    steps: int,
) -> tuple[float, float, float]:
    """Return tokens per second of `auto` over the best fixed number's and plain decoding's, and at first."""
    share, times = busy

    def held_up(rows: int) -> float:
        return seconds(rows) * (1.0 + share * (times - 1.0))

    fixed = fixed_rates(num_seqs, alpha, held_up, draft_s=draft_s)
    machine = Machine(control(), draft_s=draft_s, busy=busy)
    at_first = machine.run(num_seqs, alpha, seconds, first)
    rate = machine.run(num_seqs, alpha, seconds, steps)
    return rate / max(fixed), rate / fixed[0], at_first / max(fixed)


if __name__ == "__main__":
    main()

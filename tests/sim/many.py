"""Thousands of seeds of the scheduler fuzz: ``python -m tests.sim.many [--seeds 10000] [--first 1] [--jobs 2]``.

Every other seed has drafts and transfers. Prints what the seeds exercised, and the failures with the command that
replays each; with ``--report`` the counts also go to benchmarks/results/faults.md. Exit status 1 where a seed failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from multiprocessing import Pool

from tests.faults.report import write_section
from tests.sim.test_fuzz import run_seed

CHUNK = 50  # seeds that a process runs at a time
SHOWN = (
    "steps", "generated_tokens", "preemptions", "forks", "aborts in flight", "failed_steps", "restarted_readers",
    "zombie_results", "error step", "error capacity", "error hopeless", "late total",
    "late first_token", "policy changes", "cache resets in flight", "resumed", "evicted_blocks", "adapter waits",
    "beams", "drafts", "accepted drafts", "rejected drafts", "loads", "stores", "partial loads",
    "failed_transfers", "deaths", "transfers lost",
)  # fmt: skip


def run_chunk(seeds: range) -> tuple[Counter[str], list[str]]:
    """Run some seeds; return what they exercised, and a line for each that failed."""
    seen: Counter[str] = Counter()
    failed = []
    for seed in seeds:
        try:
            seen.update(run_seed(seed, wide=seed % 2 == 1))
        except AssertionError as error:
            failed.append(f"seed {seed} (wide: {seed % 2 == 1}): {str(error)[:600]}")
    return seen, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--minutes", type=float, default=120.0, help="stop after so long, whatever is left")
    parser.add_argument("--report", action="store_true")
    args = parser.parse_args()
    seen: Counter[str] = Counter()
    failed: list[str] = []
    begin_s, num_run = time.monotonic(), 0
    end = args.first + args.seeds
    chunks = [range(at, min(end, at + CHUNK)) for at in range(args.first, end, CHUNK)]
    with Pool(args.jobs) as pool:
        for number, (counts_of_chunk, failed_of_chunk) in enumerate(pool.imap(run_chunk, chunks), 1):
            seen += counts_of_chunk
            failed += failed_of_chunk
            num_run += len(chunks[number - 1])
            print(*failed_of_chunk, f"{num_run} seeds, {time.monotonic() - begin_s:.0f} s, {len(failed)} failed",
                  sep="\n", flush=True)  # fmt: skip
            if time.monotonic() - begin_s > 60 * args.minutes:
                break
    counts = ", ".join(f"{seen[name]:,} {name.replace('_', ' ')}" for name in SHOWN)
    text = (
        f"{num_run:,} seeds from {args.first}, every other one with drafts and KV transfers: {len(failed)} failed."
        f"\n\nExercised: {counts}.\n\nChecked after every step: the books of the cache. At the end: one terminal "
        "event per sample, the oracle's tokens, no block held, no state left in the worker."
    )
    print(text)
    if args.report:
        write_section("Simulated seeds", f"make fuzz-sim ARGS='--seeds {args.seeds}'", text)
    return 1 if failed or num_run < args.seeds else 0


if __name__ == "__main__":
    sys.exit(main())

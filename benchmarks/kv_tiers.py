"""First tokens of prompts that are computed, in memory, or on disk after a restart (``kv_tiers.py MODEL``).

A first process fills the folder and is killed. The measured one has two engines, one with the tier and one without, and
takes turns: cold, from memory, from disk (pages of the folder in memory), from disk (pages dropped). Answers have one
token, whose ids are compared. The medium is read the same way without Quire: whole segments, in pieces of 4 MiB.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.scheduler.scheduler import Wait

PIECE = 4 << 20


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(1000, 20_000) for _ in range(length)]


def engine(model: str, folder: Path | None, longest: int) -> LLM:
    tier = {} if folder is None else {"kv_disk": f"{folder}:8GiB"}
    return LLM(model, max_model_len=longest + 16, kv_memory="1GiB", **tier)


def first_token(llm: LLM, length: int) -> tuple[float, str]:
    start_s = time.perf_counter()
    (output,) = llm.generate(
        [{"prompt_token_ids": prompt_of(length)}], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False
    )
    taken_s = time.perf_counter() - start_s
    return taken_s, hashlib.sha256(repr(output.outputs[0].token_ids).encode()).hexdigest()[:8]


def settle(llm: LLM) -> None:
    """Let stores begin and end."""
    while not isinstance(llm.client.core.rest, Wait):
        llm.client.receive(timeout_s=0.01)


def fill(model: str, folder: Path, lengths: list[int]) -> None:
    llm = engine(model, folder, max(lengths))
    for length in lengths:
        first_token(llm, length)
        settle(llm)
    os.kill(os.getpid(), signal.SIGKILL)


def drop_pages(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*.seg"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def medium(folder: Path) -> float:
    """Return bytes per second of plain reads."""
    buffer = bytearray(PIECE)
    num_bytes, start_s = 0, time.perf_counter()
    for path in folder.rglob("*.seg"):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                num_bytes += count
    return num_bytes / (time.perf_counter() - start_s)


def measure(model: str, folder: Path, lengths: list[int], rounds: int) -> None:
    with_tier, without = engine(model, folder, max(lengths)), engine(model, None, max(lengths))
    kinds: dict[str, Any] = {
        "cold": (without, True, False), "memory": (without, False, False), "disk": (with_tier, True, False),
        "disk, pages dropped": (with_tier, True, True),
    }  # fmt: skip
    for llm in (with_tier, without):
        first_token(llm, 64)
    block = with_tier.client.core.executor._mover.block_bytes
    print(
        f"| tokens | kind | ms, median (least … most) | cold ÷ it | MiB/s of {block >> 10} KiB blocks | sha256 |"
    )
    print("|---|---|---|---|---|---|")
    for length in lengths:
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        digests: dict[str, set[str]] = {kind: set() for kind in kinds}
        for _ in range(rounds):
            for kind, (llm, resets, drops) in kinds.items():
                if resets:
                    llm.reset_prefix_cache()
                if drops:
                    drop_pages(folder)
                taken_s, digest = first_token(llm, length)
                settle(llm)
                times[kind].append(taken_s * 1e3)
                digests[kind].add(digest)
        assert len(set.union(*digests.values())) == 1, digests
        for kind, values in times.items():
            middle = statistics.median(values)
            ratio = statistics.median(c / v for c, v in zip(times["cold"], values, strict=True))
            rate = length // 16 * block / middle * 1e3 / 2**20 if "disk" in kind else 0
            print(
                f"| {length} | {kind} | {middle:.0f} ({min(values):.0f} … {max(values):.0f}) | {ratio:.2f} | "
                f"{rate:.0f} | {' '.join(digests[kind])} |",
                flush=True,
            )
    stats = with_tier.client.stats()
    print(f"\nloaded {stats.num_loaded_blocks} blocks, {stats.num_failed_transfers} transfers failed")
    print(f"medium: {medium(folder) / 2**20:.0f} MiB/s with pages in memory", end="")
    drop_pages(folder)
    print(f", {medium(folder) / 2**20:.0f} MiB/s after they were dropped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--lengths", default="512,2048,8000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--fill", action="store_true", help="fill the folder and end by SIGKILL")
    args = parser.parse_args()
    lengths = [int(text) for text in args.lengths.split(",")]
    folder = args.folder or Path(tempfile.mkdtemp(prefix="kv-tiers-"))
    if args.fill:
        fill(args.model, folder, lengths)
    command = [
        sys.executable,
        __file__,
        args.model,
        "--lengths",
        args.lengths,
        "--folder",
        str(folder),
        "--fill",
    ]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    measure(args.model, folder, lengths, args.rounds)


if __name__ == "__main__":
    main()

"""Share of a disk's bandwidth that the store of the disk tier has: ``python -m benchmarks.kv_store FOLDER``.

Blocks of one prompt are read by the store, and the same bytes of the same file in the same spans without it, in turns;
with the file in the page cache, and with its pages dropped before each read; and by the store with zlib's checksum. The
processor time per GB is next to it: on a machine whose cores are busy the checksums cannot overlap with the reading.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from unittest.mock import patch

from quire.tiers import record
from quire.tiers.disk import DiskStore
from quire.tiers.segment import HEAD_BYTES, SUFFIX
from quire.tiers.spans import SPAN_BYTES

ROUNDS = 15
# Bytes of a block of 16 tokens in bfloat16, and blocks per prompt.
CASES = (
    ("SmolLM2-135M, 512 tokens", 368_640, 32),
    ("SmolLM2-135M, 2,048 tokens", 368_640, 128),
    ("SmolLM2-135M, 8,192 tokens", 368_640, 512),
    ("Qwen2.5-0.5B, 2,048 tokens", 196_608, 128),
    ("Quill, 4,096 tokens", 24_576, 256),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder / "quire-kv-bench"
    head = ("blocks", "MiB", "pages", "without the store, GB/s", "store, GB/s", "share, median", "share, quartiles",
            "share with zlib", "processor s/GB: without, with, with zlib")  # fmt: skip
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for name, num_bytes, count in CASES:
        shutil.rmtree(folder, ignore_errors=True)
        with closing(DiskStore(folder, 16 << 30, "0" * 16, refreshes=False)) as store:
            compare(name, store, folder, num_bytes, count)
    shutil.rmtree(folder)
    print(f"\nload average {os.getloadavg()[0]:.1f}")


def compare(name: str, store: DiskStore, folder: Path, num_bytes: int, count: int) -> None:
    """Print the lines of one case."""
    keys = [blake2b(b"%d" % number, digest_size=32).digest() for number in range(count)]
    assert store.write(keys, [[memoryview(os.urandom(num_bytes))] for _ in keys]) == count
    os.sync()
    (path,) = folder.rglob(f"*{SUFFIX}")
    total = num_bytes * count
    memory = memoryview(mmap.mmap(-1, total))
    memory[:] = bytes(total)
    blocks = [memory[start : start + num_bytes] for start in range(0, total, num_bytes)]
    fd = os.open(path, os.O_RDONLY)

    def plain() -> None:
        for start in range(0, total, SPAN_BYTES):
            os.preadv(fd, [memory[start : start + SPAN_BYTES]], HEAD_BYTES + start)

    def stored() -> None:
        assert store.read(keys, blocks) == count

    def stored_with_zlib() -> None:
        with patch.object(record, "crc32", zlib.crc32):
            stored()

    kinds = (plain, stored, stored_with_zlib)
    for is_dropped in (False, True):
        seconds: dict[Callable[[], None], list[float]] = {kind: [] for kind in kinds}
        processor = dict.fromkeys(seconds, 0.0)
        for turn in range(ROUNDS):
            for read in kinds if turn % 2 else reversed(kinds):
                if is_dropped:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                start_s, start_cpu_s = time.perf_counter(), time.process_time()
                read()
                seconds[read].append(time.perf_counter() - start_s)
                processor[read] += time.process_time() - start_cpu_s
        shares, with_zlib = (
            [a / b for a, b in zip(seconds[plain], seconds[kind], strict=True)] for kind in kinds[1:]
        )
        low, middle, high = statistics.quantiles(shares, n=4)
        speeds = [total / 1e9 / statistics.median(each) for each in seconds.values()]
        per_gb = [each / ROUNDS / total * 1e9 for each in processor.values()]
        print(
            f"| {name} | {total >> 20} | {'dropped' if is_dropped else 'cached'} | {speeds[0]:.2f} | {speeds[1]:.2f} | "
            f"{middle:.2f} | {low:.2f} – {high:.2f} | {statistics.median(with_zlib):.2f} | "
            f"{per_gb[0]:.2f}, {per_gb[1]:.2f}, {per_gb[2]:.2f} |",
            flush=True,
        )
    os.close(fd)


if __name__ == "__main__":
    main()

"""Several processes on one folder, and what is left of one that was killed in the middle of a write."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.tiers.blocks import MIB, ROOT, keys_of, read, write

from quire.tiers.disk import DiskStore
from quire.tiers.segment import SUFFIX

NUM_BYTES = 20_000


@contextmanager
def writer(folder: Path, chain: str, size: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.tiers.writer_process", str(folder), chain, str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def lines_of(process: subprocess.Popen[str]) -> int:
    """Return the last whole number that a killed process printed."""
    assert process.stdout is not None
    numbers = [line for line in process.stdout.read().splitlines(keepends=False) if line.isdigit()]
    return int(numbers[-1]) if numbers else 0


@pytest.mark.parametrize("kill", range(6))
def test_a_killed_writer_leaves_only_whole_blocks(tmp_path: Path, kill: int) -> None:
    pause_s = random.Random(kill).uniform(0.0, 0.08)
    with writer(tmp_path, "a", 64 * MIB) as process:
        time.sleep(pause_s)
        process.kill()
        process.wait()
        count = lines_of(process)
    with closing(DiskStore(tmp_path, 64 * MIB, ROOT, refreshes=False)) as store:
        keys = keys_of(count, "a")
        assert store.contains(keys) == read(store, keys, NUM_BYTES) == count
        counts = store.counts()
        assert counts.blocks_damaged == 0
        num_files = len(list(tmp_path.rglob(f"*{SUFFIX}")))
        assert counts.size_bytes <= counts.num_blocks * (NUM_BYTES + 200) + num_files * 100, (
            "no room stays reserved"
        )


def test_processes_read_what_others_write(tmp_path: Path) -> None:
    with (
        writer(tmp_path, "a", 64 * MIB) as first,
        writer(tmp_path, "b", 64 * MIB) as second,
        closing(DiskStore(tmp_path, 64 * MIB, ROOT, refreshes=False)) as store,
    ):
        chains = [keys_of(60, "a"), keys_of(60, "b"), keys_of(60, "own")]
        assert write(store, chains[2], NUM_BYTES) == 60
        until = time.monotonic() + 60
        while any(store.contains(keys) < 60 for keys in chains) and time.monotonic() < until:
            store.refresh()
        assert [read(store, keys, NUM_BYTES) for keys in chains] == [60, 60, 60]
        assert store.counts().blocks_damaged == 0
        assert first.poll() is None
        assert second.poll() is None


def test_the_bound_holds_with_several_writers(tmp_path: Path) -> None:
    """Their chains are much longer than the bound, so each evicts all the time, its own and the others'."""
    size = 8 * MIB
    with (
        writer(tmp_path, "a", size) as first,
        writer(tmp_path, "b", size) as second,
        closing(DiskStore(tmp_path, size, ROOT)) as store,
    ):
        for process in (first, second):  # else a full pipe stops them
            assert process.stdout is not None
            threading.Thread(target=process.stdout.read, daemon=True).start()
        total = count = 0
        while count < 200 or total <= 20:  # this process also finds room
            sizes = [stat.st_size for path in tmp_path.rglob(f"*{SUFFIX}") if (stat := stat_of(path))]
            assert sum(sizes) <= size
            keys = keys_of(20, f"own {count}")
            total += write(store, keys, NUM_BYTES)
            read(store, keys, NUM_BYTES)
            count += 1


def stat_of(path: Path) -> object:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def test_threads_read_and_write_one_store(tmp_path: Path) -> None:
    """Reads run while blocks are written and segments evicted; `read` checks each block that is said to be whole."""
    failures: list[BaseException] = []
    stop = threading.Event()
    with closing(DiskStore(tmp_path, 4 * MIB, ROOT)) as store:

        def run(seed: int) -> None:
            dice = random.Random(seed)
            try:
                while not stop.is_set():
                    keys = keys_of(dice.randrange(1, 40), f"chain {dice.randrange(12)}")
                    if dice.random() < 0.4:
                        write(store, keys, NUM_BYTES)
                    read(store, keys, NUM_BYTES)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        while store.counts().blocks_read <= 2000 and not failures:
            time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join()
        assert not failures
        assert store.counts().blocks_damaged == 0

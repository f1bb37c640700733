"""A process that writes blocks of one chain until it is killed.

`python -m tests.tiers.writer_process FOLDER CHAIN SIZE` prints the number of blocks that the store says it
has, one line after each write.
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

from tests.tiers.blocks import ROOT, key_of, write

from quire.tiers.disk import DiskStore


def main() -> None:
    folder, chain, size = sys.argv[1:]
    store = DiskStore(Path(folder), int(size), ROOT)
    print("ready", flush=True)
    for number in count(0, 4):
        keys = [key_of(number + each, chain) for each in range(4)]
        if write(store, keys, 20_000) < 4:
            print("full", flush=True)
            sys.stdin.readline()
        print(number + 4, flush=True)


if __name__ == "__main__":
    main()

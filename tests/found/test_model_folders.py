"""Random folders with one key changed: Quire computes what transformers does, or refuses and names the key.

QUIRE_FOLDERS_SEED=7 pytest tests/found/test_model_folders.py      the same cases again
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from tests.found.folder_changes import Folders, fault, index_fault, random_case, random_change
from tests.found.tokenizer_changes import (
    generation_change,
    generation_fault,
    tokenizer_change,
    tokenizer_fault,
)

SEED = int(os.environ.get("QUIRE_FOLDERS_SEED", random.SystemRandom().randrange(2**32)))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    threads, level = torch.get_num_threads(), transformers.logging.get_verbosity()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity(level)
    transformers.logging.enable_progress_bar()


def faults(root: Path, seed: int, count: int) -> list[str]:
    """Return what is wrong in ``count`` cases, each with its number and its change."""
    found = []
    folders = Folders(root)
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        kind = rng.choices(("config", "tokenizer", "generation", "index"), (60, 17, 17, 6))[0]
        folder = root / f"own-{number}"
        if kind == "config" or kind == "index":
            case, rope = random_case(rng)
            change = random_change(rng, folders.base(case, rope)[1])
        if kind == "config":
            what, wrong = f"{case} ({rope}), {change}", fault(folders, case, rope, change)
        elif kind == "index":
            folder.mkdir()
            for file in folders.base(case, rope)[0].iterdir():
                os.link(file, folder / file.name)
            what, wrong = case, index_fault(folder, rng)
        else:
            folder.mkdir()
            make = tokenizer_change if kind == "tokenizer" else generation_change
            check = tokenizer_fault if kind == "tokenizer" else generation_fault
            change = make(rng)
            what, wrong = str(change), check(folder, change)
        if wrong is not None:
            found.append(f"seed {seed}, case {number}: {what}: {wrong}")
    return found


def test_no_changed_key_is_read_otherwise_in_silence(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    assert not (found := faults(tmp_path, SEED, 50)), "\n".join(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_changed_key_of_2000_is_read_otherwise_in_silence(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    assert not (found := faults(tmp_path, SEED, 2000)), "\n".join(found)

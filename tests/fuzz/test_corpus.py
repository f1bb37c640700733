"""What fuzzing found stays mended: each file of the corpus is read, or refused by one clear line, and soon."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tests.fuzz import NAMES
from tests.fuzz.seeds import seeds_of
from tests.fuzz.targets import ALLOWED, TARGETS, Target
from tests.models.test_damage import in_time


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in TARGETS.items()}


def test_every_target_has_seeds() -> None:
    assert set(NAMES) == set(TARGETS)
    assert not [
        path.name for path in Path(__file__).with_name("corpus").glob("[!.]*") if path.name not in NAMES
    ]


@pytest.mark.parametrize("name", NAMES)
def test_seeds_and_corpus_are_read_or_refused(name: str, targets: dict[str, Target]) -> None:
    seeds = seeds_of(name)
    assert seeds
    for data in seeds:
        with in_time(10), contextlib.suppress(*ALLOWED):
            targets[name](data)

"""Stores of the tests of tiers, closed at their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.blocks import MIB, ROOT

from quire.clock import VirtualClock
from quire.tiers.disk import DiskStore

OpenStore = Callable[..., DiskStore]


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(1000.0)


@pytest.fixture
def open_store(tmp_path: Path, clock: VirtualClock) -> Iterator[OpenStore]:
    """Return a function that opens a store of the test's folder; `refresh` is left to the test."""
    with ExitStack() as stack:

        def open_one(
            folder: Path = tmp_path / "kv", size: int = 64 * MIB, root: str = ROOT, **more: Any
        ) -> DiskStore:
            store = DiskStore(folder, size, root, clock=clock, refreshes=False, **more)
            return stack.enter_context(closing(store))

        yield open_one

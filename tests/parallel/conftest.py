"""The processes of ranks, shared by the tests of this folder; units of it load nothing of them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.parallel.ranks import Helpers


@pytest.fixture(scope="session")
def helpers() -> Iterator[Helpers]:
    found: Helpers = import_module("tests.parallel.ranks").Helpers()
    yield found
    found.close()

"""The processes of ranks, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.parallel.ranks import Helpers


@pytest.fixture(scope="session")
def helpers() -> Iterator[Helpers]:
    found = Helpers()
    yield found
    found.close()

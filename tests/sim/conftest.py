"""`--fuzz-seed N` replays one scenario of the fuzz: ``pytest tests/sim --fuzz-seed N``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-seed", type=int, default=None, help="replay this seed of the scheduler fuzz alone"
    )

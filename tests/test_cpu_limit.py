"""The limit of `make exact` and `make parity`: processor time, so that other work on the machine fails no test."""

from __future__ import annotations

import time

import pytest
from tests.conftest import cpu_limit


def busy(seconds: float) -> None:
    end_s = time.monotonic() + seconds
    with cpu_limit(0.2):
        while time.monotonic() < end_s:
            pass


def test_work_is_counted_and_waiting_is_not() -> None:
    with cpu_limit(0.2):
        time.sleep(0.4)
    with pytest.raises(pytest.fail.Exception, match=r"more than 0\.2 s of processor time"):
        busy(60.0)

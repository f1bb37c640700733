"""What the API loads with the first request for it is there."""

from __future__ import annotations

import inspect

from quire.api.app import LATE_COMPUTE, LATE_GENERATE, LATE_NATIVE


def test_every_late_function_is_there() -> None:
    for table in (LATE_GENERATE, LATE_COMPUTE, LATE_NATIVE):
        for path, late in table.items():
            assert inspect.iscoroutinefunction(late.load()), path

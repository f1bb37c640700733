"""Tests here run in the interpreter (`-m triton_interpret`), or on a GPU where there is one (`-m gpu`)."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    if here:
        from tests.kernels.triton.device import DEVICE

        for item in here:
            item.add_marker("gpu" if DEVICE.type == "cuda" else "triton_interpret")

"""The choice of versions."""

from __future__ import annotations

import pytest

from quire.kernels import registry


def test_without_native_kernels_everything_is_the_reference() -> None:
    assert set(registry.choose().describe().values()) == {"reference"}


@pytest.mark.parametrize("level", registry.NATIVE_LEVELS)
def test_a_level_takes_nothing_of_another(level: str) -> None:
    assert set(registry.choose(level).describe().values()) <= {level, "reference"}


def test_every_op_has_a_reference() -> None:
    for op in registry.choose().describe():
        assert "reference" in registry.backends(op), op


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(AssertionError, match="there are"):
        registry.find("nonsense", "reference")

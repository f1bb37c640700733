"""The choice of versions."""

from __future__ import annotations

import pytest
from tests.kernels.checks import runner_config

from quire.kernels import registry


def test_without_native_kernels_everything_is_the_reference() -> None:
    assert set(registry.choose().describe().values()) == {"reference"}


@pytest.mark.parametrize("level", registry.VECTOR_LEVELS)
def test_a_level_takes_nothing_of_another(level: str) -> None:
    assert set(registry.choose(runner_config(level)).describe().values()) <= {level, "reference"}


def test_every_op_has_a_reference() -> None:
    for op in registry.choose().describe():
        assert "reference" in registry.backends(op), op


def test_the_amx_level_takes_avx512_where_tiles_gain_nothing() -> None:
    if "amx" not in registry.backends("linear"):
        pytest.skip("this CPU or build has no AMX")
    chosen = registry.choose(runner_config("amx")).describe()
    assert chosen["linear"] == "amx"
    assert chosen["rms_norm"] == "avx512"


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(AssertionError, match="there are"):
        registry.find("nonsense", "reference")

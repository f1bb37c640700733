"""The choice of versions."""

from __future__ import annotations

import pytest

from quire.kernels import registry


def test_exact_takes_no_whole_matrix_version() -> None:
    assert "whole" not in registry.choose(exact=True).describe().values()


def test_whole_falls_back_to_the_reference() -> None:
    chosen = registry.choose(exact=False).describe()
    assert chosen["linear"] == "whole"
    assert chosen["rms_norm"] == "reference"


def test_every_op_has_a_reference() -> None:
    for op in registry.choose(exact=True).describe():
        assert "reference" in registry.backends(op), op


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(AssertionError, match="there are"):
        registry.find("nonsense", "reference")

"""The cases of `make test-arm` call the kernels as they are today: they can be made without a cross compiler."""

from __future__ import annotations

import pytest

pytest.importorskip("quire._native", reason="the native extension is not built")

from tests.kernels.arm.recurrent_cases import recurrent_cases
from tests.kernels.arm.write_cases import MAKERS

from quire import _native


@pytest.mark.skipif(not _native.has_isa("avx2"), reason="the expected values need an x86 machine with AVX2")
def test_the_cases_of_emulated_cpus_can_be_made() -> None:
    for make in MAKERS:
        assert list(make()), make.__name__
    assert recurrent_cases()

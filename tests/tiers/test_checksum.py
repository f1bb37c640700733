"""The checksum of tiers has zlib's values, with every width of registers: either reads what the other has written."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.tiers.checksum import crc32, native

DATA = random.Random(1).randbytes(5000)
needs_native = pytest.mark.skipif(native is None, reason="no native extension")


@given(st.integers(0, 80), st.integers(0, 1200), st.integers(0, 2**32 - 1))
def test_checksum_of_any_part_is_that_of_zlib(start: int, size: int, value: int) -> None:
    part = memoryview(DATA)[start : start + size]
    assert crc32(part, value) == zlib.crc32(part, value)


@given(st.lists(st.binary(max_size=700), max_size=5))
def test_checksum_goes_on_from_that_of_the_bytes_before(parts: list[bytes]) -> None:
    value = 0
    for part in parts:
        value = crc32(bytearray(part), value)
    assert value == zlib.crc32(b"".join(parts))


@needs_native
@pytest.mark.parametrize("bits", [0, 128, 512])
def test_every_width_has_the_same_values(bits: int) -> None:
    assert native is not None
    for size in (*range(600), 1023, 1024, 1025, 4096, 5000):
        assert native.crc32(DATA[:size], size, bits) == zlib.crc32(DATA[:size], size), size


@needs_native
def test_what_is_not_bytes_is_rejected() -> None:
    assert native is not None
    with pytest.raises((TypeError, BufferError)):
        native.crc32("text")  # type: ignore[arg-type]
    with pytest.raises(BufferError):
        native.crc32(memoryview(DATA)[::2])

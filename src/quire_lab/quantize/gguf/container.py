"""Writes a GGUF file: the header, then tensors one after the other, each aligned (version 3, little-endian)."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from quire.families.gguf_types import TENSOR_TYPES

_NUMBER_OF = {kind.name: number for number, kind in TENSOR_TYPES.items()}


class _Kind(IntEnum):
    """Types of values. Whole numbers are uint32, as llama.cpp's reader expects of its own keys, in lists int32."""

    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    FLAG = 7
    STRING = 8
    ARRAY = 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its type, as `TENSOR_TYPES` names it, and its shape, the rows first."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        kind = TENSOR_TYPES[_NUMBER_OF[self.dtype]]
        assert self.shape[-1] % kind.block == 0, self
        return prod(self.shape) // kind.block * kind.block_bytes


def write_file(
    path: Path,
    metadata: Mapping[str, Any],
    infos: Sequence[TensorInfo],
    parts: Iterator[tuple[str, bytes | memoryview]],
) -> None:
    """Write the file, synced; ``parts``: pieces of the tensors, in their order. Raises `OSError`."""
    with path.open("wb") as file:
        file.write(_header(metadata, infos))
        file.write(b"\0" * _padding(file.tell()))
        for info in infos:
            _write_tensor(file, info, parts)
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, info: TensorInfo, parts: Iterator[tuple[str, bytes | memoryview]]) -> None:
    left = info.num_bytes
    while left:
        name, data = next(parts)
        assert name == info.name, (name, info)
        file.write(data)
        left -= len(data)
        assert left >= 0, info
    file.write(b"\0" * _padding(file.tell()))


def _padding(at: int) -> int:
    """Return the bytes from ``at`` to the next tensor, which begins at a multiple of 32."""
    return -at % 32


def _header(metadata: Mapping[str, Any], infos: Sequence[TensorInfo]) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(infos), len(metadata))]
    for key, value in metadata.items():
        number, data = _value(value)
        parts += [_string(key), struct.pack("<I", number), data]
    offset = 0
    for info in infos:
        parts += [_string(info.name), struct.pack("<I", len(info.shape))]
        parts += [struct.pack("<Q", extent) for extent in reversed(info.shape)]
        parts.append(struct.pack("<IQ", _NUMBER_OF[info.dtype], offset))
        offset += info.num_bytes + _padding(info.num_bytes)
    return b"".join(parts)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> tuple[int, bytes]:
    """Return the number of a value's type, and its bytes."""
    if isinstance(value, bool):
        return _Kind.FLAG, struct.pack("<?", value)
    if isinstance(value, int):
        return (
            (_Kind.UINT32, struct.pack("<I", value))
            if value >= 0
            else (_Kind.INT32, struct.pack("<i", value))
        )
    if isinstance(value, float):
        return _Kind.FLOAT32, struct.pack("<f", value)
    if isinstance(value, str):
        return _Kind.STRING, _string(value)
    assert isinstance(value, list), value
    return _Kind.ARRAY, _array(value)


def _array(values: list[Any]) -> bytes:
    if values and isinstance(values[0], str):
        return struct.pack("<IQ", _Kind.STRING, len(values)) + b"".join(map(_string, values))
    if values and isinstance(values[0], float):
        return struct.pack("<IQ", _Kind.FLOAT32, len(values)) + struct.pack(f"<{len(values)}f", *values)
    return struct.pack("<IQ", _Kind.INT32, len(values)) + struct.pack(f"<{len(values)}i", *values)

"""GGUF files, mapped into memory: metadata, and where each tensor lies. Little-endian, versions 2 and 3.

    | "GGUF" | version | num tensors | num keys | keys and values … | tensor infos … | padding | tensor bytes … |

Torch-free. Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md. Tensor extents are stored fastest first and
reversed here.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families.gguf_types import BLOCK_TYPES, TENSOR_TYPES
from quire.models.gguf_split import part_paths
from quire.models.safetensors_file import AGAIN, StoredTensor, map_file

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# Names of the other types, for error messages.
OTHER_TYPES: Mapping[int, str] = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 31: "Q4_0_4_4", 32: "Q4_0_4_8",
    33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
# Types of ik_llama.cpp, a fork with numbers of its own; those from 200 on are its types in another order of rows.
IK_TYPES: Mapping[int, str] = {
    97: "Q8_0_X4", 98: "Q8_1_X4", 99: "Q8_2_X4", 133: "Q6_0", 134: "IQ1_BN", 135: "IQ2_BN", 136: "Q8_K64", 137: "IQ2_K",
    138: "IQ3_K", 139: "IQ4_K", 140: "IQ5_K", 141: "IQ6_K", 144: "IQ4_KS", 145: "IQ2_KS", 146: "IQ4_KSS", 152: "IQ5_KS",
    153: "IQ2_KT", 154: "IQ3_KT", 155: "IQ4_KT", 156: "IQ3_KS", 157: "IQ2_KL", 158: "IQ1_KT",
}  # fmt: skip
IK_FIRST, IK_REPACKED, IK_END = 96, 200, 400


Stored = Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """Metadata and tensors of a GGUF file, or of all parts of a split one."""

    # The first part of a split file.
    path: Path
    metadata: Mapping[str, Any]  # strings, numbers, flags and lists of them
    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]
    # Lists of float32 of the metadata, where they lie.
    lists: Mapping[str, StoredTensor]

    def floats(self, name: str) -> tuple[float, ...] | None:
        """Return a small float32 tensor as numbers (factors of a rotary embedding), None where there is none."""
        stored = self.tensors.get(name)
        if stored is None or stored.dtype != "float32":
            return None
        return struct.unpack_from(f"<{stored.num_bytes // 4}f", stored.buffer, stored.offset)


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata and the table of tensors of a file, or of all parts of a split file of which ``path`` is one.

    Raises `ModelLoadError` for a truncated or damaged file and for a missing part, `UnsupportedModelError` for a
    version, or a quantization that Quire does not read.
    """
    paths = part_paths(path)
    if len(paths) == 1:
        metadata, tensors, lists = _read_one(path)
        if _count(metadata) > 1:
            raise ModelLoadError(
                f"{path} is one of {_count(metadata)} parts and its name does not say which: name the parts as "
                f"llama-gguf-split does, {path.stem}-00001-of-{_count(metadata):05d}.gguf and so on."
            )
        return GgufFile(path, metadata, tensors, (path,), lists)
    missing = [part.name for part in paths if not part.is_file()]
    if missing:
        raise ModelLoadError(
            f"{path.parent}: {len(missing)} of the {len(paths)} parts of this model are missing, first {missing[0]}; "
            "download them into the same folder."
        )
    return _joined([(part, *_read_one(part)) for part in paths])


def _count(metadata: Mapping[str, Any]) -> int:
    return int(metadata.get("split.count", 1))


def _joined(parts: Sequence[tuple[Path, Mapping[str, Any], Stored, Stored]]) -> GgufFile:
    """Put the tensors of all parts into one table; the first part has the metadata."""
    first, metadata, _, lists = parts[0]
    tensors: dict[str, StoredTensor] = {}
    for index, (path, own, held, _) in enumerate(parts):
        if _count(own) != len(parts) or own.get("split.no", 0) != index:
            raise ModelLoadError(
                f"{path} is named as part {index + 1} of {len(parts)} and says that it is part "
                f"{int(own.get('split.no', 0)) + 1} of {_count(own)}; download the parts again."
            )
        twice = next((name for name in held if name in tensors), None)
        if twice is not None:
            raise ModelLoadError(f"{path} has {twice}, which {tensors[twice].file} has too; {AGAIN}.")
        tensors.update(held)
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise ModelLoadError(
            f"{first} says {total} tensors and its {len(parts)} parts have {len(tensors)}; {AGAIN}."
        )
    return GgufFile(first, metadata, tensors, tuple(path for path, *_ in parts), lists)


def _read_one(path: Path) -> tuple[dict[str, Any], Stored, Stored]:
    reader = _Reader(path, map_file(path))
    if reader.buffer[:4] != b"GGUF":
        raise ModelLoadError(
            f"{path} is no GGUF file (it begins with {bytes(reader.buffer[:4])!r}); {AGAIN}."
        )
    try:
        reader.at = 4
        version = reader.scalar("I")
        if version not in (2, 3):
            raise UnsupportedModelError(f"{path}: GGUF version {version} is not supported; 2 and 3 are.")
        num_tensors, num_keys = reader.scalar("Q"), reader.scalar("Q")
        metadata, lists = {}, {}
        for _ in range(num_keys):
            key, kind = reader.string(), reader.scalar("I")
            of, value = reader.scalar_at("I") if kind == _ARRAY else None, reader.value(kind)
            metadata[key] = value
            if of is not None and _SCALARS.get(of) == "f":
                size = 4 * len(value)
                lists[key] = StoredTensor(
                    "float32", (len(value),), reader.buffer, reader.at - size, size, path
                )
        infos = [reader.tensor_info() for _ in range(num_tensors)]
    except (struct.error, UnicodeDecodeError, IndexError, OverflowError, MemoryError) as error:
        raise ModelLoadError(f"{path}: the GGUF header cannot be read ({error}); {AGAIN}.") from None
    alignment = int(metadata.get("general.alignment", 32)) or 32
    base = -(-reader.at // alignment) * alignment
    return metadata, {info[0]: _stored(path, reader.buffer, base, *info) for info in infos}, lists


def _stored(
    path: Path, buffer: mmap.mmap, base: int, name: str, shape: tuple[int, ...], kind: int, offset: int
) -> StoredTensor:
    if kind not in TENSOR_TYPES:
        raise UnsupportedModelError(
            f"{path}: {name} is of type {_refusal(kind)}; supported are F32, F16, "
            f"BF16 and {', '.join(name.upper() for name in BLOCK_TYPES)}: take a file of one of these."
        )
    of = TENSOR_TYPES[kind]
    if not shape or shape[-1] % of.block:
        raise ModelLoadError(
            f"{path}: {name} has shape {shape}, no whole number of {of.name} blocks; {AGAIN}."
        )
    num_bytes = prod(shape) // of.block * of.block_bytes
    if base + offset + num_bytes > len(buffer):
        raise ModelLoadError(
            f"{path} is truncated: it has {len(buffer)} bytes and {name} ends at {base + offset + num_bytes}; {AGAIN}."
        )
    return StoredTensor(of.name, shape, buffer, base + offset, num_bytes, path, of.held)


def _refusal(number: int) -> str:
    """Return what a type that is not read is, and what to take instead."""
    if IK_FIRST <= number < IK_END:
        name = IK_TYPES.get(number, f"number {number}")
        order = " in its own order of rows" if number >= IK_REPACKED else ""
        return f"{name}, a type of ik_llama.cpp{order}, which llama.cpp's files do not have"
    if number in OTHER_TYPES:
        return f"{OTHER_TYPES[number]}, which is not supported"
    return f"number {number}, which is damaged or of a newer ggml than this version of Quire reads"


class _Reader:
    """A cursor over the mapped bytes; running past the end raises `struct.error`."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.at = 0

    def scalar_at(self, code: str) -> Any:
        """Return the next value and leave the cursor before it."""
        return struct.unpack_from("<" + code, self.buffer, self.at)[0]

    def scalar(self, code: str) -> Any:
        value = self.scalar_at(code)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        (size,) = struct.unpack_from("<Q", self.buffer, self.at)
        start = self.at + 8
        if start + size > len(self.buffer):
            raise struct.error(f"a string of {size} bytes at {self.at} of {len(self.buffer)}")
        self.at = start + size
        # Tokens of byte-level vocabularies are text, but a few files hold bytes that are not valid UTF-8.
        return self.buffer[start : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                raise struct.error(f"a value of unknown type {kind} at {self.at}")
            return self.scalar(_SCALARS[kind])
        of, count = self.scalar("I"), self.scalar("Q")
        if of in _SCALARS:
            form = f"<{count}{_SCALARS[of]}"
            values = list(struct.unpack_from(form, self.buffer, self.at))
            self.at += struct.calcsize(form)
            return values
        return [self.value(of) for _ in range(count)]

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return (name, shape, type, offset from the start of the tensor bytes)."""
        name = self.string()
        extents = [self.scalar("Q") for _ in range(self.scalar("I"))]
        return name, tuple(reversed(extents)), self.scalar("I"), self.scalar("Q")

"""Safetensors files, mapped into memory: names, types and shapes from the header, bytes only when they are touched.

    | u64 header size | JSON header | tensor bytes … |

Torch-free: the loader makes tensors of the mapped bytes. Format: github.com/huggingface/safetensors, "Format".

`not_finite` reads every stored float and finds NaN and infinity. Such a weight turns every answer that it touches into
an error ("the model's logits are not finite"), long after the load. Packed types (uint8 blocks) are skipped:
their payload has no such values, and their scales are checked where they are separate tensors; GGUF's in `gguf_check`.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import ModelLoadError, QuireError, UnsupportedModelError, clip
from quire.units import PIECE_BYTES
from quire.weight_format import PLAIN, WeightFormat

# What a header may say → the name and the bytes of an element.
_DTYPES: dict[str, tuple[str, int]] = {
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U8": ("uint8", 1),  # packed blocks, where a family's map says so
    "I8": ("int8", 1),  # quantized weights, their indices and shapes
    "F8_E4M3": ("float8_e4m3fn", 1),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
    "BOOL": ("bool", 1),  # t2d of EAGLE-3 heads, which is not read
}
_HEADER_MAX = 100_000_000  # bytes, the limit of the reference implementation
_BARE = ("embed_tokens.", "layers.", "norm.")
# "model" of a decoder that is part of a model.
_IN_OTHERS = ("model.language_model", "language_model.model", "model.text_model")
INDEX_NAME = "model.safetensors.index.json"
AGAIN = "the download is incomplete or the file is damaged: download it again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies in a mapped file. ``buffer`` keeps the mapping alive."""

    dtype: str  # "float32", "bfloat16", "int8" …; in GGUF "q8_0", "q4_k" …
    shape: tuple[int, ...]
    buffer: mmap.mmap
    offset: int  # bytes from the start of the file
    num_bytes: int
    file: Path
    held: WeightFormat = PLAIN  # GGUF's blocks

    def equals(self, other: StoredTensor) -> bool:
        """Tell whether both hold the same bytes; reads them up to the first difference."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        same = True
        for at in range(0, self.num_bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, self.num_bytes - at)
            first, second = self.offset + at, other.offset + at
            same = self.buffer[first : first + size] == other.buffer[second : second + size]
            if not same:
                break
        self.unmap_pages()
        other.unmap_pages()
        return same

    def unmap_pages(self) -> None:
        """Drop the pages that were read from this process's memory: a later read brings them back from the file."""
        start = -(-self.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (self.offset + self.num_bytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self.buffer.madvise(mmap.MADV_DONTNEED, start, size)


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turn whatever the contents of a damaged file cause in the block into one clear line.

    Raises:
        ModelLoadError: names ``path``.
    """
    try:
        yield
    except QuireError:
        raise
    except BaseException as error:
        # A Rust library's panic is no `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelLoadError(f"{path} cannot be read ({clip(why, 200)[1:-1]}); {AGAIN}.") from error


def map_file(path: Path) -> mmap.mmap:
    """Map a file privately (writes never reach it). Raises `ModelLoadError` where it cannot be opened or is empty."""
    if path.exists() and not path.is_file():  # opening a pipe would wait for a writer
        raise ModelLoadError(f"{path} is no regular file; {AGAIN}.")
    try:
        with path.open("rb") as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: there is no such file; {AGAIN}.") from None
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelLoadError(f"{path} cannot be opened ({error}); {AGAIN}.") from None


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of one file. Only the header is read.

    Raises `ModelLoadError` for a truncated or damaged file, `UnsupportedModelError` for an element type.
    """
    buffer = map_file(path)
    size = len(buffer)
    if buffer[:8] == b"version ":
        raise ModelLoadError(
            f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder, or download the file."
        )
    header_size = int.from_bytes(buffer[:8], "little") if size >= 8 else size
    if not 2 <= header_size <= min(_HEADER_MAX, size - 8):
        raise ModelLoadError(f"{path} has {size} bytes and its header says {header_size}; {AGAIN}.")
    try:
        header: Mapping[str, Any] = json.loads(buffer[8 : 8 + header_size])
        entries = [(name, item) for name, item in header.items() if name != "__metadata__"]
        tensors = {name: _stored(path, buffer, 8 + header_size, name, item) for name, item in entries}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{path} has no readable safetensors header ({clip(str(error), 200)}); {AGAIN}."
        ) from None
    for name, tensor in tensors.items():
        end = tensor.offset + tensor.num_bytes
        if end > size:
            raise ModelLoadError(
                f"{path} is truncated: it has {size} bytes and {name} ends at {end}; {AGAIN}."
            )
    return tensors


def _stored(path: Path, buffer: mmap.mmap, base: int, name: str, item: Mapping[str, Any]) -> StoredTensor:
    kind = item["dtype"]
    if kind not in _DTYPES:
        raise UnsupportedModelError(
            f"{path}: {name} is of type {kind}, which is not supported; supported are {', '.join(_DTYPES)}."
        )
    dtype, width = _DTYPES[kind]
    start, end = item["data_offsets"]
    shape = tuple(int(extent) for extent in item["shape"])
    if start < 0 or end - start != prod(shape) * width:
        raise ValueError(f"{name}: shape {shape} of {kind} does not fill bytes {start} to {end}")
    return StoredTensor(dtype, shape, buffer, base + start, end - start, path)


def checkpoint_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a folder: those that its index names, else the single file.

    Raises `ModelLoadError` where there is none, naming what is there instead, or where a shard is missing.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        names = sorted(set(read_index(index).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelLoadError(
                f"{folder}: {len(missing)} of {len(names)} shards of {INDEX_NAME} are missing, first {missing[0]}; "
                "download them into the same folder."
            )
        return tuple(folder / name for name in names)
    single = folder / "model.safetensors"
    if single.is_file():
        return (single,)
    # Mistral puts its own format beside it under this name; it repeats the weights.
    files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if len(files) == 1:
        return (files[0],)
    if files:
        raise ModelLoadError(
            f"{folder} has {len(files)} safetensors files but no {INDEX_NAME} that says which make the model; "
            "download the index too."
        )
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise ModelLoadError(
            f"{folder} has PyTorch pickles (.bin) and no safetensors; pickles can run code and are not read: "
            "convert them, for instance with transformers' save_pretrained."
        )
    raise ModelLoadError(
        f"{folder} holds no weights (model.safetensors, or shards with {INDEX_NAME}); download them there, or "
        "use load_format='random'."
    )


def read_index(path: Path) -> dict[str, str]:
    """Return tensor name → file name of an index of shards."""
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{name} is in {file!r}, which is no file name")
        return dict(weight_map)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{path} is no readable index of shards ({clip(str(error), 200)}); {AGAIN}."
        ) from None


def read_checkpoint(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a folder, from one file or from all shards of its index.

    Names are those of a text decoder: one that was saved without its head has no "model." in them, and one that is part
    of a model that sees has "language_model." there.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in checkpoint_files(folder):
        tensors.update(read_safetensors(path))
    index = folder / INDEX_NAME
    if index.is_file():
        for name, file in read_index(index).items():
            if name not in tensors:
                raise ModelLoadError(f"{folder / file} lacks {name}, which {INDEX_NAME} puts there; {AGAIN}.")
    for part in _IN_OTHERS:
        if f"{part}.embed_tokens.weight" in tensors:
            return {_own_name(name, part): tensor for name, tensor in tensors.items()}
    if "embed_tokens.weight" in tensors and "model.embed_tokens.weight" not in tensors:
        return {f"model.{n}" if n.startswith(_BARE) else n: tensor for n, tensor in tensors.items()}
    return tensors


def _own_name(name: str, part: str) -> str:
    if name.startswith(f"{part}."):
        return "model" + name.removeprefix(part)
    return name.removeprefix("language_model.") if name.startswith("language_model.lm_head.") else name


# Element type → its bits as an integer, and the bits of the exponent: all set means not finite.
_EXPONENTS: dict[str, tuple[np.dtype[Any], int]] = {
    "float32": (np.dtype(np.uint32), 0x7F80_0000),
    "float16": (np.dtype(np.uint16), 0x7C00),
    "bfloat16": (np.dtype(np.uint16), 0x7F80),
}


@dataclass(frozen=True, slots=True)
class NotFinite:
    """One tensor that should not be served."""

    name: str
    file: Path
    num_nan: int
    num_inf: int
    first: tuple[int, ...]  # index of the first such element


def not_finite(tensors: Mapping[str, StoredTensor]) -> Iterator[NotFinite]:
    """Yield each float tensor of ``tensors`` (name → where it lies) that holds a NaN or an infinity."""
    for name, stored in tensors.items():
        if stored.dtype in _EXPONENTS:
            problem = _scan(name, stored)
            if problem is not None:
                yield problem


def _scan(name: str, stored: StoredTensor) -> NotFinite | None:
    kind, exponent = _EXPONENTS[stored.dtype]
    width = kind.itemsize
    magnitude = (1 << (8 * width - 1)) - 1  # all but the sign
    raw = np.frombuffer(stored.buffer, np.uint8, stored.num_bytes, stored.offset)  # may lie at an odd address
    num_nan, num_inf, first = 0, 0, -1
    for start in range(0, stored.num_bytes, PIECE_BYTES):
        bits = raw[start : start + PIECE_BYTES].view(kind)
        bad = np.flatnonzero((bits & kind.type(exponent)) == exponent)
        if bad.size:
            first = start // width + int(bad[0]) if first < 0 else first
            infinite = int(((bits[bad] & kind.type(magnitude)) == exponent).sum())
            num_inf += infinite
            num_nan += bad.size - infinite
    if first < 0:
        return None
    index = tuple(int(i) for i in np.unravel_index(first, stored.shape))
    return NotFinite(name, stored.file, num_nan, num_inf, index)

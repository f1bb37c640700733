"""`check_copies`: PEFT saves an end of the model beside LoRA of it, and that must be the model's own. Torch-free.

PEFT puts such a matrix in place of the model's when it loads the adapter, for every adapter at once. Quire serves one
model, so it takes only adapters that were trained on it. Training in another float type rounds the model's numbers, and
they are compared as they were rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.errors import ModelLoadError
from quire.lora.adapter import AdapterFile
from quire.models.checkpoint import stored_sources
from quire.models.safetensors_file import StoredTensor
from quire.modelspec import ModelSpec
from quire.units import PIECE_BYTES

Floats = npt.NDArray[np.float32]
_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}


def check_copies(file: AdapterFile, model: Path, spec: ModelSpec) -> tuple[str, ...]:
    """Compare what ``file`` has of the model at ``model`` with that; return a line for each that cannot be compared.

    Raises `ModelLoadError` for one that differs, naming it.
    """
    if not file.copies:
        return ()
    tensors, sources = stored_sources(model, spec)
    lines = []
    for end, copy in file.copies.items():
        source = sources[
            "embed.weight" if end == "embed_tokens" or spec.tie_word_embeddings else "lm_head.weight"
        ]
        own = tensors.get(source.take.names[0]) if source.scheme is None else None
        if own is None or own.dtype not in _WIDTHS:
            lines.append(
                f"adapter {file.adapter.name}: its copy of {end} is not compared: the model's is quantized"
            )
        elif not _same(copy, own):
            raise ModelLoadError(
                f"{copy.file}: its copy of {end} differs from that of {model}: the adapter was trained on another "
                "model. Serve it on that one, or list the module in modules_to_save."
            )
    return tuple(lines)


def _same(copy: StoredTensor, own: StoredTensor) -> bool:
    """Tell whether ``copy`` is ``own``, or ``own`` rounded to a float type."""
    if copy.equals(own):
        return True
    possible: list[Callable[[Floats], Floats]] = [_as_it_is, _to_bfloat16, _to_float16]
    count = copy.num_bytes // _WIDTHS[copy.dtype]
    for first in range(0, count, PIECE_BYTES):
        some = min(PIECE_BYTES, count - first)
        copied, original = _numbers(copy, first, some), _numbers(own, first, some)
        possible = [rounded for rounded in possible if np.array_equal(copied, rounded(original))]
        if not possible:
            return False
    return True


def _numbers(stored: StoredTensor, first: int, count: int) -> Floats:
    width = _WIDTHS[stored.dtype]
    raw = np.frombuffer(stored.buffer, np.uint8, count * width, stored.offset + first * width)
    if stored.dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float32 if width == 4 else np.float16).astype(np.float32)


def _as_it_is(numbers: Floats) -> Floats:
    return numbers


def _to_bfloat16(numbers: Floats) -> Floats:
    bits = numbers.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def _to_float16(numbers: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16).astype(np.float32)

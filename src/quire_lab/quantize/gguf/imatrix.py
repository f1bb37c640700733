"""Reads llama.cpp's importance matrices: for each matrix the mean square of each of its inputs.

A file is GGUF (``NAME.in_sum2 [matrices, in]`` and ``NAME.counts [matrices, 1]``) or of the older form:

    number of entries | name, number of chunks, number of values, values … | …

Experts of a layer lie in one entry, one after the other. Only the ratios of the values of one matrix matter.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ConfigError, ModelLoadError
from quire.models.gguf_file import GgufFile, read_gguf


def read_imatrix(path: Path) -> Mapping[str, Tensor]:
    """Return the values by the names of GGUF's tensors, ``[matrices · in]``.

    Raises:
        ConfigError: it cannot be read, or has a value that is negative or no finite number.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"imatrix: {path} cannot be read: {error}") from None
    try:
        importance = _of_gguf(read_gguf(path)) if data[:4] == b"GGUF" else _older(data)
    except (ModelLoadError, ValueError, struct.error, UnicodeDecodeError) as error:
        raise ConfigError(f"imatrix: {path} is no importance matrix of llama.cpp: {error}") from None
    for name, values in importance.items():
        if not torch.isfinite(values).all() or (values < 0.0).any():
            raise ConfigError(f"imatrix: {path}: {name} has a value that is negative or no finite number")
    return importance


def _of_gguf(file: GgufFile) -> dict[str, Tensor]:
    importance = {}
    for name, stored in file.tensors.items():
        base = name.removesuffix(".in_sum2")
        if base == name:
            continue
        sums, counts = file.floats(name), file.floats(f"{base}.counts")
        if sums is None or counts is None:
            raise ValueError(f"{name} is no float32 tensor, or has no counts")
        rows = torch.tensor(sums).view(-1, stored.shape[-1])
        count = torch.tensor(counts).view(-1, 1)
        if len(count) != len(rows):
            raise ValueError(f"{name} has {len(rows)} matrices and {len(count)} counts")
        importance[base] = torch.where(count > 0.0, rows / count.clamp_min(1.0), 1.0).flatten()
    if not importance:
        raise ValueError("it has no tensor NAME.in_sum2")
    return importance


def _older(data: bytes) -> dict[str, Tensor]:
    (count,), at = struct.unpack_from("<i", data), 4
    importance = {}
    for _ in range(count):
        (length,) = struct.unpack_from("<i", data, at)
        name = struct.unpack_from(f"<{length}s", data, at + 4)[0].decode()
        num_chunks, num_values = struct.unpack_from("<ii", data, at + 4 + length)
        at += 12 + length
        values = torch.tensor(struct.unpack_from(f"<{num_values}f", data, at))
        at += 4 * num_values
        importance[name] = values / max(1, num_chunks)
    if not importance:
        raise ValueError("it has no entries")
    return importance

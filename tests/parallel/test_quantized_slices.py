"""A part of a stored quantized matrix decodes to the same numbers as that part of the whole."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.families import Take
from quire.families.gguf_types import BLOCK_TYPES
from quire.families.quantization_scheme import Scheme
from quire.kernels.linear.packed import QuantizedWeight
from quire.models.safetensors_file import StoredTensor
from quire.models.stored_weights import open_quantized
from quire.models.weight_sources import Source
from quire.parallel.shard import Cut
from quire.quant.stored import StoredMatrix, dequantize
from quire.weight_format import WeightFormat

OUT, IN, GROUP = 24, 768, 64
ROWS, COLUMNS = range(3, 17), range(192, 640)  # within a block of 256, at whole groups


def stored(dtype: str, shape: tuple[int, ...], data: bytes) -> StoredTensor:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return StoredTensor(dtype, shape, memory, 0, len(data), Path("test"))


def read(source: Source, tensors: dict[str, StoredTensor], cut: Cut) -> QuantizedWeight:
    matrix = open_quantized(source, tensors, cut)
    assert isinstance(matrix, StoredMatrix)
    assert matrix.shape == cut.shape((OUT, IN))
    return matrix.read(0, matrix.shape[0])


def check(source: Source, tensors: dict[str, StoredTensor]) -> None:
    whole = dequantize(read(source, tensors, Cut("w")))
    for rows, columns in ((ROWS, None), (None, COLUMNS), (ROWS, COLUMNS)):
        part = dequantize(read(source, tensors, Cut("w", rows, columns)))
        of_rows, of_columns = (
            slice(each.start, each.stop) if each else slice(None) for each in (rows, columns)
        )
        torch.testing.assert_close(part, whole[of_rows, of_columns], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_blocks_of_gguf(name: str) -> None:
    kind = BLOCK_TYPES[name]
    rng = np.random.default_rng(1)
    data = rng.integers(60, 90, OUT * IN // kind.block * kind.block_bytes, dtype=np.uint8).tobytes()
    source = Source(Take(("w",), (OUT, IN)), kind.held)
    check(source, {"w": stored(name, (OUT, IN), data)})


SHAPES = {
    "gptq": {"q": (IN // 8, OUT), "scale": (IN // GROUP, OUT), "zero": (IN // GROUP, OUT // 8)},
    "awq": {"q": (IN, OUT // 8), "scale": (IN // GROUP, OUT), "zero": (IN // GROUP, OUT // 8)},
    "packed": {"q": (OUT, IN // 8), "scale": (OUT, IN // GROUP), "zero": (OUT // 8, IN // GROUP)},
    "int8": {"q": (OUT, IN), "scale": (OUT, 1)},
}


@pytest.mark.parametrize("encoding", SHAPES)
def test_words_of_safetensors(encoding: str) -> None:
    grouped = encoding != "int8"
    scheme = Scheme(encoding, 4 if grouped else 8, GROUP if grouped else None, not grouped)  # type: ignore[arg-type]
    held = WeightFormat("int4", GROUP, has_offset=True) if grouped else WeightFormat("int8")
    rng, tensors = np.random.default_rng(2), {}
    for part, shape in SHAPES[encoding].items():
        count = int(np.prod(shape))
        if part == "scale":
            data = rng.random(count).astype(np.float16).tobytes()
            tensors[part] = stored("float16", shape, data)
        else:
            dtype = "int32" if grouped else "int8"
            size = count * (4 if grouped else 1)
            tensors[part] = stored(dtype, shape, rng.integers(0, 256, size, dtype=np.uint8).tobytes())
    parts = ({part: part for part in tensors},)
    check(Source(Take(("w",), (OUT, IN)), held, scheme, parts), tensors)

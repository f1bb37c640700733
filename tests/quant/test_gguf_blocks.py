"""Every block type of ggml: goldens of llama.cpp's C code, the gguf package on random bytes, and wrong scales."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quire.errors import ModelLoadError, QuireError, UnsupportedModelError
from quire.families.gguf_types import BLOCK_TYPES
from quire.families.weights import Take
from quire.kernels.linear import pack_empty
from quire.kernels.linear.packed import held_scales, range_of, storable_scales
from quire.kernels.registry import backends
from quire.models.safetensors_file import StoredTensor
from quire.models.stored_weights import open_quantized
from quire.models.weight_sources import Source
from quire.parallel.shard import Cut
from quire.quant.ggml_blocks import decode_rows
from quire.quant.stored import StoredMatrix, dequantize

SEED = 11
# Where a zero point is folded into the offset, which is then rounded once more.
FOLDED = ("q4_1",)
# Types whose scales are packed without rounding: one fp16 number, a power of two, or two numbers as in the file.
EXACT_SCALES = (
    "q4_0", "q5_0", "q8_0", "iq4_nl", "tq1_0", "tq2_0", "mxfp4",
    "q4_1", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs",
)  # fmt: skip
EXACT_OFFSETS = ("q5_1", "q2_k", "q4_k", "q5_k")
EXPANDED = ("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq1_s", "iq1_m", "tq1_0", "tq2_0")
# One block of random bytes per type, and its fp32 weights by llama.cpp's `ggml_type_traits.to_float`, in hexadecimal.
GOLDENS = json.loads((Path(__file__).parent / "ggml_goldens.json").read_text())


def random_rows(name: str, rows: int, blocks: int) -> np.ndarray:
    """Random bytes: any bytes are a legal block."""
    form = BLOCK_TYPES[name]
    raw = np.random.default_rng(SEED).integers(0, 256, (rows, blocks, form.block_bytes), dtype=np.uint8)
    if name == "mxfp4":  # 255 is NaN
        raw[:, :, 0] = np.minimum(raw[:, :, 0], 254)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_a_block_decodes_as_llama_cpp_decodes_it(name: str) -> None:
    golden = GOLDENS[name]
    expected = torch.from_numpy(np.frombuffer(bytes.fromhex(golden["weights"]), np.float32).copy())
    raw = torch.frombuffer(bytearray.fromhex(golden["block"]), dtype=torch.uint8)
    found = dequantize(decode_rows(raw.unsqueeze(0), name))[0]
    tolerance = 2e-7 * float(expected.abs().max()) if name in FOLDED else 0.0
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_decoded_blocks_equal_the_oracle(name: str) -> None:
    raw = random_rows(name, 40, 16)
    with np.errstate(all="ignore"):
        oracle = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name.upper()])
    expected = torch.from_numpy(oracle.copy())
    found = decode_rows(torch.from_numpy(raw), name)
    form = BLOCK_TYPES[name]
    assert found.q.dtype == torch.int8
    assert found.shape == (40, 16 * form.block)
    limits = range_of(form.held)
    assert limits is not None
    low, high = limits
    assert low <= found.q.min()
    assert found.q.max() <= high
    assert form.held.group is not None
    assert found.scale.shape == (40, 16 * form.block // form.held.group)
    assert (found.offset is not None) == form.held.has_offset
    finite = torch.isfinite(expected)
    assert finite.float().mean() > 0.9
    left, right = dequantize(found)[finite], expected[finite]
    if name in FOLDED:
        assert ((left - right).abs() <= 2e-7 * right.abs().max()).all()
    else:
        assert torch.equal(left, right)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_packed_scales_are_exact_or_rounded_to_11_bits(name: str) -> None:
    raw = random_rows(name, 40, 8)
    if name == "mxfp4":
        raw[:, ::17] = 100 + raw[:, ::17] % 30
    weight = decode_rows(torch.from_numpy(raw), name)
    usable = torch.isfinite(weight.scale).all(1)
    if weight.offset is not None:
        usable &= torch.isfinite(weight.offset).all(1)
    scale, offset = weight.scale[usable], weight.offset
    held, held_offset = held_scales(weight)
    # The smallest fp16 step of a row; a scale below it adds nothing to a sum in fp32.
    largest = weight.scale.abs() if offset is None else torch.maximum(weight.scale.abs(), offset.abs())
    step = largest[usable].amax(1, keepdim=True) * 2.0**-38
    error = ((held[usable] - scale).abs() - step).clamp(min=0) / scale.abs().clamp(min=step)
    print(f"{name}: at most {float(error.max()):.1e}")
    assert error.max() <= (0.0 if name in EXACT_SCALES else 2.0**-11)
    if name in EXACT_OFFSETS:
        assert offset is not None
        assert held_offset is not None
        assert ((held_offset - offset)[usable].abs() <= step).all()


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_memory_has_the_size_of_the_file(name: str) -> None:
    """But 4 bytes per row, scales of 6 bits that are held in 8, and types that are expanded."""
    form = BLOCK_TYPES[name]
    in_file, held = 4096 // form.block * form.block_bytes, form.held.num_bytes(1, 4096, 2) - 4
    if name in EXPANDED:
        assert held > in_file
    elif name in ("q3_k", "q4_k", "q5_k", "iq4_xs"):
        assert in_file < held <= 1.04 * in_file
    else:
        assert held == in_file
    packed = pack_empty(
        64, 4096, torch.float32, bias=False, backend=backends("quantized_linear")[-1], format=form.held
    )
    if packed.backend != "reference":
        assert packed.data.nbytes == 64 * held


def opened(raw: np.ndarray, name: str, shape: tuple[int, ...]) -> StoredMatrix:
    buffer = mmap.mmap(-1, raw.nbytes)
    buffer.write(raw.tobytes())
    stored = StoredTensor(name, shape, buffer, 0, raw.nbytes, Path("model.gguf"))
    source = Source(Take(("blk.0.ffn_up.weight",), shape), BLOCK_TYPES[name].held)
    matrix = open_quantized(source, {"blk.0.ffn_up.weight": stored}, Cut("w"))
    assert isinstance(matrix, StoredMatrix)
    return matrix


# Where a block has a float16 that scales it.
PLACES = {
    "q8_0": 0, "q4_1": 2, "q2_k": 82, "q3_k": 108, "q4_k": 2, "q6_k": 208, "iq4_xs": 0, "iq2_s": 0, "tq1_0": 52,
}  # fmt: skip


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", PLACES)
def test_a_scale_that_is_not_finite_names_tensor_and_file(name: str, value: float) -> None:
    form, at = BLOCK_TYPES[name], PLACES[name]
    raw = np.full((6, form.block_bytes), 1, dtype=np.uint8)
    raw[4, at : at + 2] = np.array([value], np.float16).view(np.uint8)
    matrix = opened(raw, name, (6, form.block))
    with pytest.raises(
        ModelLoadError, match=rf"model\.gguf: blk\.0\.ffn_up\.weight \({name.upper()}\).*row 4"
    ):
        list(matrix.ranges())


@pytest.mark.parametrize(
    ("scales", "error"),
    [
        ((90, 128), None),
        ((89, 128), UnsupportedModelError),
        ((255, 120), ModelLoadError),
        ((5, 5), UnsupportedModelError),
        ((250, 250), UnsupportedModelError),
    ],
)
def test_scales_of_mxfp4_fit_the_packed_form_or_are_refused(
    scales: tuple[int, int], error: type[QuireError] | None
) -> None:
    raw = np.full((1, 34), 0x21, dtype=np.uint8)
    raw[0, [0, 17]] = scales
    matrix = opened(raw, "mxfp4", (1, 64))
    if error is None:
        weight = matrix.read(0, 1)
        half, _, power = storable_scales(weight.scale, None)
        assert torch.equal(half.float() * power, weight.scale)
        return
    with pytest.raises(error, match=r"model\.gguf: blk\.0\.ffn_up\.weight \(MXFP4\).*row 0"):
        matrix.read(0, 1)


def test_a_block_of_zeros_does_not_widen_the_range_of_mxfp4() -> None:
    raw = np.full((1, 34), 0x21, dtype=np.uint8)
    raw[0, :17] = 0
    raw[0, 17] = 120
    weight = opened(raw, "mxfp4", (1, 64)).read(0, 1)
    assert weight.scale.tolist() == [[0.0, 2.0**-8]]

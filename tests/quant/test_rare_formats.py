"""bitsandbytes, HQQ and NVFP4: the numbers that their own libraries read, whole models, cuts, and what is refused.

rare_goldens.json: random matrices [4, 64] that bitsandbytes 0.50.2, hqq 0.2.8 and compressed-tensors 0.20.0 wrote, and
what they expand them to.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.tiny import model_config
from tests.quant.checkpoints import Made, Written, ct_config, make
from tests.quant.perplexity import Text, nats

from quire.args import EngineArgs
from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families import Take
from quire.families.quantization import read_quantization
from quire.families.quantization_scheme import Scheme
from quire.families.shape import Fields
from quire.models.checkpoint import describe
from quire.models.loader import iter_weights
from quire.models.rare_formats import PARTS, held_as_rare
from quire.models.rare_weights import open_rare
from quire.quant.stored import StoredMatrix, dequantize

GOLDENS = json.loads((Path(__file__).parent / "rare_goldens.json").read_text())
TEXT = Text(((5, 9, 60, 31, 7, 50, 33, 34, 35, 8, 19, 77),), 1, 1)
NF4 = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302,
       0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]  # fmt: skip
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def tensor(stored: list[Any]) -> torch.Tensor:
    dtype, shape, data = stored
    raw = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).view(shape)


def opened(
    name: str, columns: range | None = None, take: Take | None = None, **changes: torch.Tensor
) -> StoredMatrix:
    golden = GOLDENS[name]
    scheme = Scheme(
        golden["encoding"], golden["bits"], golden["group"], symmetric=True, strided=golden["strided"]
    )
    names = {part: suffix for part, suffix in PARTS[scheme.encoding].items() if suffix in golden["tensors"]}
    tensors = {part: tensor(golden["tensors"][suffix]) for part, suffix in names.items()} | changes
    take = take or Take(("x.weight",), (4, 64))
    held, expanded = held_as_rare(take, scheme)
    return open_rare(take, held, scheme, tensors, names, columns, expanded=expanded)


@pytest.mark.parametrize("name", GOLDENS)
def test_numbers_are_those_of_the_formats_own_library(name: str) -> None:
    matrix, plain = opened(name), tensor(GOLDENS[name]["plain"])
    expanded = matrix.expand(torch.float32)
    assert torch.allclose(expanded, plain, rtol=1e-6, atol=1e-6 * float(plain.abs().max()))
    if matrix.plain is not None:
        assert torch.equal(expanded, plain)
    held = torch.cat([dequantize(part) for _, part in matrix.ranges()])
    step = plain.abs().view(4, -1, matrix.format.group or 64).amax(2, keepdim=True) / 127
    lost = (held - plain).view(4, step.shape[1], -1).abs()
    assert (lost <= step * (0.501 if matrix.plain is not None else 1e-4)).all()


@pytest.mark.parametrize("name", GOLDENS)
def test_a_part_is_decoded_alone(name: str) -> None:
    whole = torch.cat([dequantize(part) for _, part in opened(name).ranges()])
    columns = range(32, 64) if opened(name).format.group in (16, 32) else None  # whole groups
    part = opened(name, columns, Take(("x.weight",), (4, 64), start=1, stop=3))
    alone = torch.cat([dequantize(each) for _, each in part.ranges()])
    assert torch.equal(alone, whole[1:3] if columns is None else whole[1:3, 32:])


def nvfp4(rng: np.random.Generator, shape: tuple[int, int], *, divides: bool) -> Written:
    out, in_ = shape
    codes = rng.integers(0, 16, shape)
    scales = torch.from_numpy(rng.uniform(20, 200, (out, in_ // 16)).astype(np.float32)).to(
        torch.float8_e4m3fn
    )
    common = np.float32(800.0)
    levels = np.array([*E2M1, *(-level for level in E2M1)], np.float32)
    factor = scales.float().numpy() / common if divides else scales.float().numpy() * (np.float32(1) / common)
    weight = levels[codes] * np.repeat(factor, 16, axis=1)
    packed = np.zeros((out, in_ // 2), np.uint8)
    for column in range(in_):
        packed[:, column // 2] |= (codes[:, column] << 4 * (column % 2)).astype(np.uint8)
    q, scale, whole, rows = (
        ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale") if divides
        else ("weight", "weight_scale", "weight_scale_2", "input_scale")
    )  # fmt: skip
    one = np.array([common if divides else np.float32(1) / common], np.float32)
    tensors = {q: packed, scale: scales.view(torch.uint8).numpy(), whole: one, rows: np.ones(1, np.float32)}
    return Written(tensors, weight)


def nf4(rng: np.random.Generator, shape: tuple[int, int]) -> Written:
    count = shape[0] * shape[1]
    codes, absmax = rng.integers(0, 16, count), rng.uniform(0.1, 0.3, count // 32).astype(np.float32)
    levels = np.array(NF4, np.float32)
    packed = np.array([[codes[i] << 4 | codes[i + 1]] for i in range(0, count, 2)], np.uint8)
    state = json.dumps({"quant_type": "nf4", "blocksize": 32, "dtype": "float16", "shape": shape}).encode()
    tensors = {
        "weight": packed, "weight.absmax": absmax, "weight.quant_map": levels,
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(state, np.uint8).copy(),
    }  # fmt: skip
    return Written(tensors, (levels[codes] * np.repeat(absmax, 32)).astype(np.float32).reshape(shape))


def hqq(rng: np.random.Generator, shape: tuple[int, int]) -> Written:
    groups = shape[0] * shape[1] // 32
    codes = rng.integers(0, 16, (groups, 32))
    scale = rng.uniform(0.01, 0.04, (groups, 1)).astype(np.float16)
    zero = rng.uniform(5, 10, (groups, 1)).astype(np.float16)
    half = groups // 2
    tensors = {
        "W_q": (codes[:half] << 4 | codes[half:]).astype(np.uint8), "scale": scale, "zero": zero,
        "nbits": np.array(4, np.int32), "axis": np.array(1, np.int32), "view_as_float": np.array(0, np.uint8),
    }  # fmt: skip
    weight = (codes.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)
    return Written(tensors, weight.reshape(shape))


def scales_as_fp8(stored: dict[str, torch.Tensor]) -> None:
    for name, found in stored.items():
        if name.endswith("weight_scale"):
            stored[name] = found.view(torch.float8_e4m3fn)


def nvfp4_config() -> dict[str, Any]:
    config = ct_config(
        "nvfp4-pack-quantized",
        4,
        16,
        type="float",
        strategy="tensor_group",
        scale_dtype="torch.float8_e4m3fn",
    )
    rows = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    config["config_groups"]["group_0"]["input_activations"] = rows
    return config


BITSANDBYTES = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
    "llm_int8_threshold": 6.0, "llm_int8_skip_modules": ["lm_head"], "_load_in_4bit": True, "_load_in_8bit": False,
}  # fmt: skip
HQQ = {
    "quant_method": "hqq", "skip_modules": ["lm_head"],
    "quant_config": {
        "weight_quant_params": {"nbits": 4, "group_size": 32, "axis": 1, "channel_wise": True, "view_as_float": False},
        "scale_quant_params": None,
    },
}  # fmt: skip
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head"],
    "producer": {"name": "modelopt"},
}
Write = Callable[[np.random.Generator, tuple[int, int]], Written]
# writer, quantization_config, how weights are held, what start-up says
MODELS: dict[str, tuple[Write, dict[str, Any], str, str]] = {
    "nf4": (nf4, BITSANDBYTES, "int8, groups of 32", "bitsandbytes: 14, expanded, and rounded again to int8"),
    "hqq": (hqq, HQQ, "int4, groups of 32 with offsets", "HQQ: 14, with the same numbers"),
    "nvfp4": (
        partial(nvfp4, divides=True),
        nvfp4_config(),
        "int8, groups of 16",
        "NVFP4: 14, as int8 in groups of 16",
    ),
    "modelopt": (
        partial(nvfp4, divides=False),
        MODELOPT,
        "int8, groups of 16",
        "NVFP4: 14, as int8 in groups of 16",
    ),
}


def made_model(name: str, tmp_path: Path) -> Made:
    write, config, *_ = MODELS[name]
    return make(
        tmp_path, write, config, change=scales_as_fp8 if "nvfp4" in name or name == "modelopt" else None
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_weights_of_its_plain_one(name: str, tmp_path: Path) -> None:
    *_, held, says = MODELS[name]
    made = made_model(name, tmp_path)
    found, plain = describe(made.quantized), describe(made.plain)
    assert {str(each) for each in found.formats.values()} == {held}
    assert any(says in line for line in found.remarks)
    expected = dict(iter_weights(model_config(plain.path, plain.spec), torch.float32))
    for canonical, weight in iter_weights(model_config(found.path, found.spec), torch.float32):
        assert torch.allclose(weight, expected[canonical], rtol=1e-5, atol=1e-6), canonical  # type: ignore[arg-type]
    common: dict[str, Any] = {"dtype": "float32", "cpu_isa": "reference", "max_model_len": 16}
    exact, kept = (
        nats(EngineArgs(model=str(folder), **common), TEXT) for folder in (made.plain, made.quantized)
    )
    assert abs(kept - exact) <= 0.03 * exact


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bytes in floats": (BITSANDBYTES | {"bnb_4bit_quant_storage": "bfloat16"}, "quant_storage = 'bfloat16'"),
    "another table": (BITSANDBYTES | {"bnb_4bit_quant_type": "int4"}, "quant_type = 'int4'"),
    "an unknown key": (BITSANDBYTES | {"bnb_8bit_shape": 3}, "bnb_8bit_shape = 3"),
    "settings by module": (
        {"quant_method": "hqq", "quant_config": {"self_attn.q_proj": {}}},
        "weight_quant_params",
    ),
    "scales in 8 bits": (
        HQQ | {"quant_config": HQQ["quant_config"] | {"scale_quant_params": {"nbits": 8}}},  # type: ignore[operator]
        "scale_quant_params",
    ),
    "ModelOpt's fp8": (MODELOPT | {"quant_algo": "FP8"}, "quant_algo = 'FP8'.*--quantize int8"),
    "a quantized cache": (MODELOPT | {"kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo = 'FP8'"),
    "other groups": (MODELOPT | {"group_size": 32}, "group_size = 32"),
    "2:4": (
        ct_config("pack-quantized", 4, 32) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparse",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_is_not_read_is_named(name: str) -> None:
    config, says = REFUSED[name]
    with pytest.raises((UnsupportedModelError, ModelLoadError), match=says):
        read_quantization(Fields({"quantization_config": config}))


def test_damage_names_the_tensor(tmp_path: Path) -> None:
    state = torch.frombuffer(bytearray(b"{"), dtype=torch.uint8)
    for name, changes, says in (
        ("bitsandbytes nf4", {"state_nf4": state}, "bitsandbytes__nf4 is not readable"),
        ("bitsandbytes nf4", {"scale": torch.ones(3)}, "absmax has 3 numbers, and blocks of 64 need 4"),
        ("bitsandbytes fp4", {"scale": torch.full((4,), torch.nan)}, "absmax holds NaN"),
        (
            "nvfp4 compressed-tensors",
            {"scale": torch.full((4, 4), torch.nan).to(torch.float8_e4m3fn)},
            "holds NaN",
        ),
        ("bitsandbytes int8", {"layout": torch.tensor(2)}, "weight_format says that the rows"),
        ("hqq 4 bits, axis 1", {"nbits": torch.tensor(3)}, "nbits is 3, and quantization_config says 4"),
        ("hqq 4 bits, axis 1", {"quant_zero": torch.tensor(1)}, "quant_zero is set"),
        ("nvfp4 compressed-tensors", {"global": torch.tensor([0.0])}, "weight_global_scale is 0"),
    ):
        with pytest.raises((UnsupportedModelError, ModelLoadError), match=says):
            opened(name, **changes)
    made = made_model("nf4", tmp_path)
    config = json.loads((made.quantized / "config.json").read_text())
    (made.quantized / "config.json").write_text(json.dumps(config | {"intermediate_size": 192}))
    with pytest.raises(ModelLoadError, match=r"gate_proj\.weight has 5,120 numbers, and 6,144 belong"):
        describe(made.quantized)

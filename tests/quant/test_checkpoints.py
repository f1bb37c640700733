"""compressed-tensors, AutoAWQ and GPTQ: the same numbers as the plain model they mean; strict about what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.tiny import model_config
from tests.quant import checkpoints as made_by
from tests.quant.checkpoints import (
    Made,
    RandomMatrix,
    Written,
    awq_config,
    ct_config,
    gptq_config,
    make,
    random_matrix,
)

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.checkpoint import describe
from quire.models.loader import iter_weights
from quire.quant.stored import StoredMatrix, dequantize
from quire.weight_format import WeightFormat

Write = Callable[[np.random.Generator, tuple[int, int]], Written]


def writer(pack: Callable[..., Written], width: int, group: int | None, *, zeros: bool, **more: Any) -> Write:
    def write(rng: np.random.Generator, shape: tuple[int, int]) -> Written:
        return pack(random_matrix(rng, shape, width, group, not zeros), **more)

    return write


def gptq(bits: int, group: int, *, sym: bool = True, minus_one: bool = True, **more: Any) -> Write:
    whole = None if group == -1 else group
    return writer(made_by.gptq, bits, whole, zeros=not sym, bits=bits, minus_one=minus_one, **more)


def packed(bits: int, group: int | None, *, sym: bool = True) -> Write:
    return writer(made_by.packed, bits, group, zeros=not sym, bits=bits, sym=sym)


INT8 = writer(made_by.int8, 8, None, zeros=False)
AWQ = writer(made_by.awq, 4, 32, zeros=True)
# name → writer, quantization_config, how k ([32, 64]) is held
CASES: dict[str, tuple[Write, dict[str, Any], WeightFormat]] = {
    "ct-int4-g32": (packed(4, 32), ct_config("pack-quantized", 4, 32), WeightFormat("int4", 32)),
    "ct-int4-g32-asym": (
        packed(4, 32, sym=False), ct_config("pack-quantized", 4, 32, sym=False), WeightFormat("int4", 32, True)
    ),
    "ct-int4-channel": (packed(4, None), ct_config("pack-quantized", 4, None), WeightFormat("int4", 64)),
    "ct-int8-g32-packed": (packed(8, 32), ct_config("pack-quantized", 8, 32), WeightFormat("int8", 32)),
    "ct-w8a8": (INT8, ct_config("int-quantized", 8, None), WeightFormat("int8")),
    "awq-g32": (AWQ, awq_config(32), WeightFormat("int4", 32, True)),
    "awq-gemv-g32": (
        writer(made_by.awq_gemv, 4, 32, zeros=True), awq_config(32, version="GEMV"), WeightFormat("int4", 32, True)
    ),
    "gptq-g32": (gptq(4, 32), gptq_config(4, 32), WeightFormat("int4", 32)),
    "gptq-channel": (gptq(4, -1), gptq_config(4, -1), WeightFormat("int4", 64)),
    "gptq-asym": (gptq(4, 32, sym=False), gptq_config(4, 32, sym=False), WeightFormat("int4", 32, True)),
    "gptq-v2-asym": (
        gptq(4, 32, sym=False, minus_one=False), gptq_config(4, 32, sym=False, checkpoint_format="gptq_v2"),
        WeightFormat("int4", 32, True),
    ),
    "gptq-8-bits": (gptq(8, 32), gptq_config(8, 32), WeightFormat("int8", 32)),
}  # fmt: skip


def held(made: Made) -> dict[str, StoredMatrix]:
    """The matrices as they are held, by canonical name."""
    found = describe(made.quantized)
    model = model_config(found.path, found.spec, formats=dict(found.formats))
    return {n: w for n, w in iter_weights(model, torch.float32) if isinstance(w, StoredMatrix)}


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_the_plain_model(name: str, tmp_path: Path) -> None:
    write, config, expected_format = CASES[name]
    made = make(tmp_path, write, config)
    plain, found = describe(made.plain), describe(made.quantized)
    assert found.dtype == "float16"
    expected = dict(iter_weights(model_config(plain.path, plain.spec), torch.float32))
    expanded = dict(iter_weights(model_config(found.path, found.spec), torch.float32))
    for canonical, tensor in expected.items():
        error = (expanded[canonical] - tensor).abs().max() / tensor.abs().max()
        assert error <= (1e-6 if expected_format.has_offset else 0.0), (canonical, error)
    matrices = held(made)
    assert len(matrices) == 2 * len(made_by.LINEARS)
    for canonical, matrix in matrices.items():
        assert torch.equal(matrix.expand(torch.float32), expanded[canonical]), canonical
    assert matrices["layers.0.attn.k.weight"].format == expected_format


def in_act_order(
    pack: Callable[[RandomMatrix], Written], *, sym: bool, group_of_last: int | None = None
) -> Write:
    """A writer of groups of 32 inputs in any order."""

    def write(rng: np.random.Generator, shape: tuple[int, int]) -> Written:
        matrix = random_matrix(rng, shape, 4, 32, sym)
        written = pack(replace(matrix, order=rng.permutation(shape[1]) // 32))
        if group_of_last is not None:
            written.tensors["g_idx"][-1] = group_of_last
        return written

    return write


ACT_ORDER: dict[str, tuple[Write, dict[str, Any]]] = {
    "gptq": (in_act_order(partial(made_by.gptq, bits=4), sym=True), gptq_config(4, 32, desc_act=True)),
    "gptq-asym": (
        in_act_order(partial(made_by.gptq, bits=4), sym=False), gptq_config(4, 32, sym=False, desc_act=True)
    ),
    "gptq-v2": (
        in_act_order(partial(made_by.gptq, bits=4, minus_one=False), sym=False),
        gptq_config(4, 32, sym=False, desc_act=True, checkpoint_format="gptq_v2"),
    ),
    "compressed-tensors": (
        in_act_order(partial(made_by.packed, bits=4, sym=False), sym=False),
        ct_config("pack-quantized", 4, 32, sym=False, actorder="group"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ACT_ORDER)
def test_act_order_is_expanded_and_rounded_again(name: str, tmp_path: Path) -> None:
    write, config = ACT_ORDER[name]
    made = make(tmp_path, write, config)
    plain, found = describe(made.plain), describe(made.quantized)
    assert set(found.formats.values()) == {WeightFormat("int8", 32)}
    assert any("groups of inputs in an order of their own: 14," in line for line in found.remarks)
    expected = dict(iter_weights(model_config(plain.path, plain.spec), torch.float32))
    expanded = dict(iter_weights(model_config(found.path, found.spec), torch.float32))
    matrices = held(made)
    assert len(matrices) == 2 * len(made_by.LINEARS)
    for canonical, tensor in expected.items():
        assert isinstance(tensor, torch.Tensor)
        weight = expanded[canonical]
        assert isinstance(weight, torch.Tensor)
        torch.testing.assert_close(weight, tensor, rtol=0, atol=1e-6 * float(tensor.abs().max()))
        if canonical not in matrices:
            continue
        matrix, groups = matrices[canonical], weight.unflatten(1, (-1, 32))
        error = dequantize(matrix.read(0, matrix.shape[0])).unflatten(1, (-1, 32)) - groups
        assert (error.abs() <= groups.abs().amax(2, keepdim=True) / 127 * 0.501).all(), canonical
        assert torch.equal(matrix.rows(range(9, 30)).read(2, 11).q, matrix.read(11, 20).q)


def fp8_ct_config(strategy: str) -> dict[str, Any]:
    config = ct_config("float-quantized", 8, None, type="float", strategy=strategy)
    a = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    config["config_groups"]["group_0"]["input_activations"] = a
    return config


BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
FP8: dict[str, tuple[Callable[[tuple[int, int]], tuple[int, ...]], str, dict[str, Any], int | None]] = {
    "ct-channel": (lambda s: (s[0], 1), "weight_scale", fp8_ct_config("channel"), None),
    "ct-tensor": (lambda s: (1,), "weight_scale", fp8_ct_config("tensor"), None),
    "tensor": (lambda s: (), "weight_scale", {"quant_method": "fp8", "activation_scheme": "dynamic"}, None),
    "blocks": (lambda s: (-(-s[0] // 128), s[1] // 128), "weight_scale_inv", BLOCKS, 128),
    "short-blocks": (lambda s: (-(-s[0] // 128), -(-s[1] // 128)), "weight_scale_inv", BLOCKS, 64),
}


@pytest.mark.parametrize("name", FP8)
def test_fp8(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held as it is stored for a GPU; k has fewer rows than a block, and a short block ends each row of its case."""
    scales, suffix, config, group = FP8[name]
    hidden, intermediate = (192, 320) if name == "short-blocks" else (256, 384)
    sizes = {64: hidden, 160: intermediate, 32: hidden // 4}
    for key, value in (
        ("hidden_size", hidden),
        ("intermediate_size", intermediate),
        ("num_key_value_heads", 1),
    ):
        monkeypatch.setitem(made_by.CONFIG, key, value)
    for key, shape in made_by.LINEARS.items():
        monkeypatch.setitem(made_by.LINEARS, key, (sizes[shape[0]], sizes[shape[1]]))

    def write(rng: np.random.Generator, shape: tuple[int, int]) -> Written:
        return made_by.fp8(rng, shape, scales(shape), suffix)

    made = make(tmp_path, write, config, change=made_by.as_fp8)
    plain, found = describe(made.plain), describe(made.quantized)
    assert set(found.formats.values()) == {WeightFormat("fp8", group)}
    expected = dict(iter_weights(model_config(plain.path, plain.spec), torch.float32))
    expanded = dict(iter_weights(model_config(found.path, found.spec), torch.float32))
    matrices = held(made)
    assert len(matrices) == 2 * len(made_by.LINEARS)
    for canonical, tensor in expected.items():
        assert torch.equal(expanded[canonical], tensor), canonical  # type: ignore[arg-type]
    for canonical, matrix in matrices.items():
        assert torch.equal(matrix.expand(torch.float32), expanded[canonical]), canonical  # type: ignore[arg-type]
        part = matrix.read(3, 40)
        assert torch.equal(part.q.float(), matrix.read(0, matrix.shape[0]).q[3:40].float())


def test_a_part_of_the_rows_is_decoded_alone(tmp_path: Path) -> None:
    """Ranges that begin and end within a word of eight outputs."""
    for name in ("awq-g32", "awq-gemv-g32", "gptq-asym", "ct-int4-g32-asym"):
        write, config, _ = CASES[name]
        (tmp_path / name).mkdir()
        matrix = held(make(tmp_path / name, write, config))["layers.1.mlp.up.weight"]
        whole = matrix.read(0, 160)
        for start, stop in ((3, 5), (8, 16), (13, 160), (0, 1)):
            part = matrix.read(start, stop)
            assert torch.equal(part.q, whole.q[start:stop])
            assert torch.equal(part.scale, whole.scale[start:stop])
            assert part.offset is not None
            assert whole.offset is not None
            assert torch.equal(part.offset, whole.offset[start:stop])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "3 bits": (gptq_config(4, 32) | {"bits": 3}, r"bits = 3.*4 or 8"),
    "marlin": (gptq_config(4, 32, checkpoint_format="marlin"), "checkpoint_format = 'marlin'"),
    "an unknown key": (gptq_config(4, 32, lut_size=3), "lut_size = 3"),
    "overrides by module": (gptq_config(4, 32, dynamic={"x": {"bits": 8}}), "dynamic = "),
    "group 0": (gptq_config(4, 0), "group_size = 0"),
    "gemv_fast": (
        awq_config(32, version="gemv_fast"),
        "version = 'gemv_fast'.*Take a checkpoint of version 'gemm'",
    ),
    "no zero points": (awq_config(32, zero_point=False), "zero_point = False"),
    "an unknown order": (ct_config("pack-quantized", 4, 32, actorder="sorted"), "actorder = 'sorted'"),
    "packed fp8": (ct_config("pack-quantized", 8, None, type="float"), "type = 'float'"),
    "static activations": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        "activation_scheme = 'static'",
    ),
    "e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'"),
    "other blocks": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size.*128, 128"),
    "a scale a tensor": (ct_config("int-quantized", 8, None, strategy="tensor"), "strategy = 'tensor'"),
    "marlin-24": (ct_config("marlin-24", 4, 32), "format = 'marlin-24'"),
    "frozen": (ct_config("pack-quantized", 4, 32) | {"quantization_status": "frozen"}, "'frozen'"),
    "fp8 KV": (ct_config("pack-quantized", 4, 32) | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    "a transform": (ct_config("pack-quantized", 4, 32) | {"transform_config": {"a": 1}}, "transform_config"),
    "EXL2": ({"quant_method": "exl2", "bits": 4.0}, "'exl2'.*gptq"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_read_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config, says = REFUSED[name]
    made = make(tmp_path, gptq(4, 32), config)
    with pytest.raises((UnsupportedModelError, ModelLoadError), match=says):
        describe(made.quantized)


@pytest.mark.parametrize(
    "change",
    [{"dynamic": False}, {"strategy": "tensor"}, {"symmetric": False}, {"num_bits": 4}, {"type": "float"}],
)
def test_activations_that_no_kernel_has_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    config = ct_config("int-quantized", 8, None)
    config["config_groups"]["group_0"]["input_activations"] |= change
    with pytest.raises(
        (UnsupportedModelError, ModelLoadError), match=f"input_activations.*{next(iter(change))}"
    ):
        describe(make(tmp_path, INT8, config).quantized)


K = "model.layers.1.self_attn.k_proj"
SPOILED: dict[str, tuple[Write, dict[str, Any], Callable[[dict[str, torch.Tensor]], None], str]] = {
    "another group size": (
        gptq(4, 32), gptq_config(4, -1), lambda s: None, r"scales has shape \[\d, 64\].*\[1, 64\]"
    ),
    "a part is missing": (
        AWQ, awq_config(32), lambda s: s.pop(f"{K}.scales"), rf"missing.*{K}.weight"
    ),
    "words of another type": (
        AWQ, awq_config(32), lambda s: s.update({f"{K}.qweight": s[f"{K}.qweight"].long()}), "qweight is of type int64"
    ),
    "int8 that is not": (
        INT8, ct_config("int-quantized", 8, None),
        lambda s: s.update({f"{K}.weight": s[f"{K}.weight"].half()}), f"{K}.weight is of type float16.*int8",
    ),
    "no config for it": (
        packed(4, 32), ct_config("pack-quantized", 4, 32) | {"ignore": ["re:.*k_proj"]}, lambda s: None,
        r"missing.*k_proj.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_contradictions_name_the_tensor(name: str, tmp_path: Path) -> None:
    write, config, change, says = SPOILED[name]
    made = make(tmp_path, write, config, change=change)
    with pytest.raises(ModelLoadError, match=says):
        describe(made.quantized)


def test_values_that_contradict_the_config(tmp_path: Path) -> None:
    """What only the bytes say is found when they are read."""
    beyond = in_act_order(partial(made_by.gptq, bits=4), sym=True, group_of_last=7)
    bias = {f"{K}.bias": torch.ones(32).half()}
    cases: list[tuple[Write, dict[str, Any], dict[str, torch.Tensor], str]] = [
        (beyond, gptq_config(4, 32, desc_act=True), {}, r"g_idx names group 7 of"),
        (gptq(4, 32, sym=False), gptq_config(4, 32), {}, "qzeros has zero points.*symmetric"),
        (gptq(4, 32), gptq_config(4, 32), bias, f"{K}.bias is not zero"),
    ]
    for index, (how, config, more, says) in enumerate(cases):
        (tmp_path / str(index)).mkdir()
        made = make(tmp_path / str(index), how, config, change=partial(add, more))
        with pytest.raises((ModelLoadError, UnsupportedModelError), match=says):
            held(made)
    (tmp_path / "zero").mkdir()
    made = make(
        tmp_path / "zero",
        gptq(4, 32),
        gptq_config(4, 32),
        change=partial(add, {f"{K}.bias": 0 * bias[f"{K}.bias"]}),
    )
    assert held(made)


def add(more: dict[str, torch.Tensor], stored: dict[str, torch.Tensor]) -> None:
    stored.update(more)

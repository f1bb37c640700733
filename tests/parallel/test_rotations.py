"""Which matrices are rotated before they are rounded: in the largest block that fits, on every rank alike."""

from __future__ import annotations

import pytest
from tests.parallel.test_shard import plain

from quire.args import EngineArgs
from quire.config import DeviceInfo
from quire.modelspec import ModelSpec
from quire.parallel.rotations import rotated
from quire.parallel.shard import shard
from quire.parallel.topology import Topology
from quire.resolve import resolve
from quire.weight_format import WeightFormat
from quire.weight_plan import plan_weights

CPU = DeviceInfo("cpu", "test", 2, 2**33, 2**33, isa="avx512", native=True)
GPU = DeviceInfo("cuda", "test", 2, 2**36, 2**36, capability=(9, 0))
OUT, UP, DOWN = (f"layers.0.{part}.weight" for part in ("attn.o", "mlp.up", "mlp.down"))


def blocks_of(spec: ModelSpec, tp: int = 1, quantize: str = "int8") -> dict[str, int | None]:
    formats = plan_weights(spec, {}, quantize, None).formats
    return {name: held.rotation for name, held in rotated(spec, formats, {}, tp).items()}


@pytest.mark.parametrize(
    ("inter", "block"), [(384, 64), (96, 32), (176, 16), (172, None), (4864, 64), (1376, 32)]
)
def test_the_largest_block_that_divides_the_inputs(inter: int, block: int | None) -> None:
    found = blocks_of(plain(6, 64, inter))
    assert found[UP] == 64
    assert found[DOWN] == block
    assert found["lm_head.weight"] == 64


@pytest.mark.parametrize("quantize", ["int8-g32", "int4", "int4-g128"])
def test_weights_with_groups_are_rotated_too(quantize: str) -> None:
    found = blocks_of(plain(6, 64, 384), quantize=quantize)
    assert set(found.values()) == {64}


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("head_dim", [16, 32, 48, 64])
@pytest.mark.parametrize("inter", [768, 1040, 1536, 4864])
def test_a_block_lies_on_one_rank(inter: int, head_dim: int, tp: int) -> None:
    spec = plain(12, head_dim, inter)
    found = blocks_of(spec, tp)
    assert found[UP] == 64, "no rank cuts its inputs"
    for rank in range(tp):
        cuts = shard(spec, Topology(tp=tp), rank).cuts
        for name in (OUT, DOWN):
            columns, block = cuts[name].columns, found[name]
            assert columns is not None
            if block is not None:
                assert columns.start % block == columns.stop % block == 0, (name, columns, block)
    if inter == 1536:
        assert found[DOWN] == 64
    if head_dim == 64:
        assert found[OUT] == 64


def test_stored_integers_stay_as_they_are() -> None:
    spec = plain(6, 64, 384)
    stored = {UP: WeightFormat("int8"), DOWN: WeightFormat("int4", 32, has_offset=True)}
    asked = plan_weights(spec, stored, None, "int8").formats
    found = rotated(spec, asked, stored)
    assert {name: found[name] for name in stored} == stored
    assert found["lm_head.weight"] == WeightFormat("int8", rotation=64)


def test_a_gpu_rotates_nothing() -> None:
    """It multiplies integers with plain rows."""
    spec = plain(6, 64, 384)
    for quantize in ("int8", "int4"):
        args = EngineArgs(quantize=quantize)
        on_gpu = resolve(args, spec, GPU).model.formats
        assert not any(held.rotation for held in on_gpu.values())
        on_cpu = resolve(args, spec, CPU).model.formats
        assert all(held.rotation == 64 for held in on_cpu.values())
        assert on_cpu.keys() == on_gpu.keys()


def test_a_rotation_takes_no_bytes() -> None:
    spec = plain(6, 64, 384)
    formats = plan_weights(spec, {}, "int4", None).formats
    assert spec.weight_bytes("bfloat16", rotated(spec, formats, {})) == spec.weight_bytes("bfloat16", formats)

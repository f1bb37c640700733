"""Which matrix is held in which format, what that takes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.args import EngineArgs
from quire.config import DeviceInfo
from quire.errors import ConfigError
from quire.models.weight_sources import held_as
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec, weight_shapes
from quire.resolve import resolve, step_bytes
from quire.rope_spec import RopeSpec
from quire.weight_format import PLAIN, WeightFormat
from quire.weight_plan import parse_format, plan_weights, role_of
from quire.weight_table import activations_of, weight_table

ATTENTION = AttentionSpec(4, 2, 16, 16, 0.25, RopeSpec(10000.0, 16), qk_norm="head")
MOE = MlpSpec(64, moe=MoeSpec(4, 2, 64, shared_intermediate_size=64, shared_gate=True))
LAYERS = (LayerSpec(ATTENTION, MlpSpec(172)), LayerSpec(ATTENTION, MOE))
SPEC = ModelSpec("llama", "LlamaForCausalLM", 512, 64, LAYERS, 1e-5, 4096)
TIED = replace(SPEC, tie_word_embeddings=True)
DEVICE = DeviceInfo("cpu", "test", 2, 2**33, 2**33, isa="avx512", native=True)


def test_what_is_quantized_and_what_is_not() -> None:
    plan = plan_weights(SPEC, {}, "int8", None)
    plain = set(weight_shapes(SPEC)) - set(plan.formats)
    assert {name.split(".", 2)[-1] if name.startswith("layers") else name for name in plain} == {
        "embed.weight", "norm.weight", "attn_norm.weight", "mlp_norm.weight", "attn.q_norm.weight",
        "attn.k_norm.weight", "moe.router.weight", "moe.shared_gate.weight",
    }  # fmt: skip
    assert role_of(TIED, "embed.weight") == "head"
    assert role_of(SPEC, "embed.weight") == "table"


def test_the_output_matrix_keeps_eight_bits_unless_asked() -> None:
    assert plan_weights(SPEC, {}, "int4", None).formats["lm_head.weight"] == WeightFormat("int8")
    assert plan_weights(TIED, {}, "int4", None).formats["embed.weight"] == WeightFormat("int8")
    assert plan_weights(SPEC, {}, "int4", "int4-g64").formats["lm_head.weight"] == WeightFormat("int4", 64)
    assert "lm_head.weight" not in plan_weights(SPEC, {}, "int4", "none").formats
    assert list(plan_weights(SPEC, {}, None, "int8").formats) == ["lm_head.weight"]


def test_int4_keeps_what_loses_most_in_8_bits() -> None:
    spec = replace(SPEC, layers=(LayerSpec(ATTENTION, MlpSpec(384)),) * 16)
    formats = plan_weights(spec, {}, "int4", None).formats
    wide = {name for name, held in formats.items() if held == WeightFormat("int8")} - {"lm_head.weight"}
    downs = {0, 1, 4, 7, 10, 13, 14, 15}
    assert wide == {
        *(f"layers.{i}.attn.{part}.weight" for i in range(16) for part in "kv"),
        *(f"layers.{i}.mlp.down.weight" for i in downs),
    }  # fmt: skip
    assert {held for name, held in formats.items() if name not in wide} == {
        WeightFormat("int4", 16), formats["lm_head.weight"],
    }  # fmt: skip
    uniform = plan_weights(spec, {}, "int4-g16", None).formats
    assert [name for name, held in uniform.items() if held.kind == "int8"] == ["lm_head.weight"]


def test_inputs_that_no_group_divides_are_said() -> None:
    plan = plan_weights(SPEC, {}, "int4", None)
    assert plan.formats["layers.0.mlp.down.weight"] == WeightFormat("int8")
    assert plan.formats["layers.0.mlp.up.weight"] == WeightFormat("int4", 16)
    assert plan.remarks == (
        "1 × mlp.down as int8 with a scale a row: 172 inputs are no multiple of a group of 16",
    )


def test_a_quantized_checkpoint_is_kept_or_expanded() -> None:
    stored = {"layers.0.attn.q.weight": WeightFormat("int4", 32, has_offset=True)}
    assert plan_weights(SPEC, stored, None, None).formats == stored
    assert plan_weights(SPEC, stored, "none", None).formats == {}
    with pytest.raises(
        ConfigError, match=r"quantize = 'int8': .*quantized already \(int4, groups of 32 with off.*'none'"
    ):
        plan_weights(SPEC, stored, "int8", None)
    head = {"lm_head.weight": WeightFormat("int8", 16)}
    with pytest.raises(ConfigError, match=r"quantize_head = 'int4'.*int8, groups of 16"):
        plan_weights(SPEC, head, None, "int4")
    assert plan_weights(SPEC, head, None, "none").formats == {}


@pytest.mark.parametrize("text", ["int3", "int4-g48", "int4-g8", "fp8-g64", "", "int8-32", "INT8"])
def test_values_that_are_refused(text: str) -> None:
    with pytest.raises(
        ConfigError, match=f"quantize = {text!r} must be one of none, int8, int4, fp8.*int4-g128"
    ):
        parse_format(text, name="quantize")


def test_stored_groups_are_held_without_loss_or_not_at_all() -> None:
    assert held_as("int4", 256, 1024, has_offset=True) == WeightFormat("int4", 128, True)
    assert held_as("int4", None, 172, has_offset=False) == WeightFormat("int8")
    assert held_as("int4", None, 96, has_offset=False) == WeightFormat("int4", 32)
    assert held_as("int8", 1024, 1024, has_offset=False) == WeightFormat("int8")
    assert held_as("int4", 16, 64, has_offset=False) == WeightFormat("int8", 16)
    assert held_as("int8", 24, 96, has_offset=False) is None
    assert held_as("int8", 32, 80, has_offset=False) is None


def test_the_memory_budget_counts_quantized_bytes() -> None:
    tight = replace(DEVICE, memory_available_bytes=16 * 2**20)
    budgets = {}
    for quantize in (None, "int8", "int4"):
        config = resolve(EngineArgs(quantize=quantize), SPEC, tight)
        weights = SPEC.weight_bytes("bfloat16", config.model.formats)
        page = config.kv_layout.block_bytes(16, "bfloat16")
        left = tight.memory_available_bytes - step_bytes(EngineArgs(), SPEC) - weights
        assert config.cache.num_blocks == left // 2 // page
        budgets[quantize] = weights
        assert sum(row.num_bytes for row in weight_table(SPEC, "bfloat16", config.model.formats)) == weights
    assert budgets[None] == SPEC.weight_bytes("bfloat16") > budgets["int8"] > budgets["int4"]
    keys = {resolve(EngineArgs(quantize=q), SPEC, DEVICE).cache.model_key for q in (None, "int8", "int4")}
    assert len(keys) == 3


def test_bytes_by_hand() -> None:
    assert PLAIN.num_bytes(10, 64, 2) == 1280
    assert WeightFormat("int8").num_bytes(10, 64, 2) == 10 * (64 + 4)
    assert WeightFormat("int4", 32).num_bytes(10, 64, 2) == 10 * (32 + 2 * 2 + 4)
    assert WeightFormat("int4", 32, has_offset=True).num_bytes(10, 64, 2) == 10 * (32 + 2 * 4 + 4)
    assert WeightFormat("int4", 32).num_bytes(1, 40, 2) == 32 + 2 * 2 + 4  # the last group is padded
    assert WeightFormat("int4", 16).num_bytes(10, 64, 2) == 10 * (32 + 4 // 2 + 4)  # half a byte a group
    assert WeightFormat("int4", 16).num_bytes(1, 65, 2) == 2 * (32 + 2) + 4  # the last block is padded


@pytest.mark.parametrize("asked", ["int4", "int4-g16"])
def test_integer_scales_are_for_cpus(asked: str) -> None:
    here = resolve(EngineArgs(quantize=asked), SPEC, DEVICE).model.formats
    assert here["layers.0.mlp.up.weight"].two_level
    gpu = replace(DEVICE, kind="cuda", capability=(9, 0))
    there = resolve(EngineArgs(quantize=asked, quantize_head=asked), SPEC, gpu).model.formats
    assert there["layers.0.mlp.up.weight"] == there["lm_head.weight"] == WeightFormat("int4", 32)


def test_a_token_reads_its_experts_and_one_row_of_the_table() -> None:
    rows = {row.part: row for row in weight_table(SPEC, "bfloat16", {})}
    experts = 3 * 4 * 64 * 64 * 2
    assert rows["linears"].num_bytes - rows["linears"].bytes_per_token == experts // 2
    assert rows["embedding table"].bytes_per_token == 64 * 2
    assert rows["output matrix"].bytes_per_token == rows["output matrix"].num_bytes == 512 * 64 * 2


def test_what_rounds_the_rows_of_linears_is_said() -> None:
    assert activations_of("bfloat16", {}) == "bfloat16"
    grouped = {"a": WeightFormat("int4", 32), "b": WeightFormat("int8", 16), "c": WeightFormat("int4", 128)}
    assert (
        activations_of("bfloat16", grouped)
        == "int8, a scale per 32 inputs or per 64 inputs (bfloat16 elsewhere)"
    )
    rotated = {"a": WeightFormat("int8", rotation=64)}
    assert activations_of("float32", rotated) == "int8, a scale a token, rotated (float32 elsewhere)"

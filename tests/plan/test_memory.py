"""Bytes against figures computed by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.models.test_gguf_file import write_gguf

from quire.cli.flags import PlanArgs
from quire.cost.hardware import find_hardware
from quire.cost.presets import preset_of, preset_spec, presets
from quire.cost.split import Split, shard_of
from quire.families import spec_from_config
from quire.models.checkpoint import describe, spec_of
from quire.models.precision import precision_of
from quire.modelspec import ModelSpec
from quire.units import GIB
from quire.weight_table import weight_table
from quire_lab.cli.plan import question_of
from quire_lab.plan.memory import (
    MemoryPlan,
    kv_bytes_per_request,
    kv_bytes_per_token,
    kv_scale_bytes_per_token,
    plan_memory,
)


def mistral() -> ModelSpec:
    """Mistral 7B v0.1: every layer sees 4,096 positions and no more."""
    return spec_from_config(
        {
            "architectures": ["MistralForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 32000,
            "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "max_position_embeddings": 32768, "sliding_window": 4096, "torch_dtype": "bfloat16",
        }
    )  # fmt: skip


# 2 · layers · kv heads · head_dim · 2 bytes; MLA: layers · (latent 512 + rope 64) · 2 bytes
@pytest.mark.parametrize(
    ("preset", "per_token"),
    [
        ("llama-2-7b", 2 * 32 * 32 * 128 * 2),
        ("llama-2-70b", 2 * 80 * 8 * 128 * 2),
        ("llama-3-70b", 327_680),
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-405b", 516_096),
        ("llama-3.2-1b", 2 * 16 * 8 * 64 * 2),
        ("qwen3-0.6b", 2 * 28 * 8 * 128 * 2),
        ("qwen3-32b", 262_144),
        ("qwen3-30b-a3b", 98_304),
        ("mixtral-8x7b", 131_072),
        ("gpt-oss-20b", 49_152),
        ("deepseek-v3", 70_272),
    ],
)
def test_kv_bytes_per_token(preset: str, per_token: int) -> None:
    assert kv_bytes_per_token(preset_spec(preset)) == per_token


@pytest.mark.parametrize(
    ("spec", "context", "kv_dtype", "expected"),
    [
        (preset_spec("llama-3-70b"), 4096, "bf16", 1_342_177_280),  # 1.25 GiB, 1.34 GB
        (preset_spec("llama-2-7b"), 4096, "bf16", 2 * GIB),
        (preset_spec("llama-3.1-8b"), 8192, "bf16", GIB),
        (preset_spec("llama-3.1-8b"), 8192, "fp8", GIB // 2),
        (
            preset_spec("llama-3.1-8b"),
            8192,
            "int8",
            GIB // 2 + 8192 * 32 * 8 * 8,
        ),  # and two scales of 4 bytes a head
        (preset_spec("deepseek-v3"), 4096, "bf16", 287_834_112),  # MLA: 0.27 GiB of a 671 B model
        # 12 layers see 4,096 tokens, 12 the last 128: 2,048 bytes a layer and token
        (preset_spec("gpt-oss-20b"), 4096, "bf16", 12 * 2048 * 4096 + 12 * 2048 * 128),
        (mistral(), 4096, "bf16", 536_870_912),
        (mistral(), 32768, "bf16", 536_870_912),  # the window is full
    ],
)
def test_kv_bytes_per_request(spec: ModelSpec, context: int, kv_dtype: str, expected: int) -> None:
    assert kv_bytes_per_request(spec, context, kv_dtype) == expected


@pytest.mark.parametrize("preset", ["llama-3.1-8b", "qwen3-0.6b", "deepseek-v3"])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_request_takes_the_bytes_of_its_pages(preset: str, dtype: str) -> None:
    """The planner and the block pool count the same bytes."""
    spec = preset_spec(preset)
    if dtype == "int8" and spec.layers[0].attention.is_mla:
        pytest.skip("latents are not kept in int8")
    page = spec.kv_layout(4096).block_bytes(16, {"bf16": "bfloat16"}.get(dtype, dtype))
    assert kv_bytes_per_request(spec, 4096, dtype) == page * 4096 // 16
    assert kv_bytes_per_token(spec, dtype) + kv_scale_bytes_per_token(spec, dtype) == page // 16


@pytest.mark.parametrize("preset", sorted(presets()))
def test_one_device_holds_every_weight_once(preset: str) -> None:
    spec = preset_spec(preset)
    assert shard_of(spec, "bf16", Split()).weight_bytes == 2 * spec.num_params


def test_two_devices_hold_the_norms_twice_and_the_rest_once() -> None:
    spec = preset_spec("llama-3.1-8b")
    norms = (2 * 32 + 1) * 4096 * 2
    assert 2 * shard_of(spec, "bf16", Split(tp=2)).weight_bytes == 2 * spec.num_params + norms


def test_quantized_weights_take_what_quire_holds() -> None:
    spec = preset_spec("llama-3.1-8b")
    head, linears = 128256 * 4096, 8_030_261_248 - 2 * 128256 * 4096 - 65 * 4096
    rows = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096) + 128256  # a scale of 4 bytes each
    assert shard_of(spec, "int8", Split()).weight_bytes == linears + head + 4 * rows + 2 * (head + 65 * 4096)
    assert shard_of(spec, "fp8", Split()).weight_bytes == linears + 2 * (2 * head + 65 * 4096)


def test_memory_of_a_device_adds_up() -> None:
    spec, h100 = preset_spec("llama-3.1-70b"), find_hardware("H100_SXM")
    m = plan_memory(spec, h100, Split(tp=4), precision="bf16", kv_dtype="bf16", context=4096,
                    max_num_batched_tokens=8192, max_num_seqs=256)  # fmt: skip
    assert m.capacity == 80 * GIB
    assert m.kv_pool == m.usable - m.weights - m.activations - m.workspace - m.graphs
    assert m.kv_request_share == m.kv_bytes_per_request // 4
    assert m.max_requests == m.kv_pool // m.kv_request_share
    one = plan_memory(spec, h100, Split(), precision="bf16", kv_dtype="bf16", context=4096,
                      max_num_batched_tokens=8192, max_num_seqs=256)  # fmt: skip
    assert not one.fits


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.1-70B", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("nvidia/DeepSeek-R1-NVFP4", "deepseek-r1"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("openai/gpt-oss-120b", "gpt-oss-120b"),
        ("qwen3-235b-a22b-fp8", "qwen3-235b-a22b"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "llama-3.3-70b"),
        ("somebody/else", None),
    ],
)
def test_hub_ids_find_their_preset(name: str, preset: str | None) -> None:
    assert preset_of(name) == preset


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("gpt-oss-120b", "mxfp4"),
        ("openai/gpt-oss-20b", "mxfp4"),
        ("unsloth/gpt-oss-20b-BF16", "bf16"),
        ("deepseek-ai/DeepSeek-V3.1", "fp8"),
        ("nvidia/DeepSeek-R1-NVFP4", "fp4"),
        ("moonshotai/Kimi-K2.5", "int4"),
        ("qwen3-235b-a22b-fp8", "fp8"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", "fp8"),
        ("RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic", "fp8"),
        ("casperhansen/llama-3.3-70b-instruct-awq", "int4"),
        ("llama-3.1-8b", "bf16"),
    ],
)
def test_a_name_has_its_published_format(name: str, published: str) -> None:
    assert precision_of(name, spec_of(name)) == published


def test_sizes_of_published_formats() -> None:
    """61 GiB of gpt-oss-120b are on the hub, and 642 GiB of DeepSeek-V3 without the layer that drafts."""
    sizes = {name: shard_of(spec_of(name), precision_of(name, spec_of(name)), Split()).weight_bytes / GIB
             for name in ("gpt-oss-120b", "gpt-oss-20b", "deepseek-v3")}  # fmt: skip
    assert sizes["gpt-oss-120b"] == pytest.approx(60.8, abs=0.5)
    assert sizes["gpt-oss-20b"] == pytest.approx(12.8, abs=0.3)
    assert sizes["deepseek-v3"] == pytest.approx(627, abs=2)


@pytest.mark.parametrize(
    ("stated", "precision"),
    [
        ({}, "bf16"),
        ({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, "int4"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int8"),
    ],
    ids=["plain", "fp8", "awq", "gptq-8"],
)  # fmt: skip
def test_a_folder_has_the_format_of_its_config(
    tmp_path: Path, stated: dict[str, object], precision: str
) -> None:
    config = dict(presets()["llama-3.2-1b"]) | ({"quantization_config": stated} if stated else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert precision_of(str(tmp_path), spec_of(str(tmp_path))) == precision


@pytest.mark.parametrize(("model", "kv_dtype"), [("llama-3.1-70b", "bf16"), ("gpt-oss-20b", "int8")])
def test_the_largest_context_fits_and_one_token_more_does_not(model: str, kv_dtype: str) -> None:
    spec = replace(preset_spec(model), max_position_embeddings=10**9)

    def plan(context: int) -> MemoryPlan:
        return plan_memory(
            spec, find_hardware("h100"), Split(tp=4), precision="bf16", kv_dtype=kv_dtype, context=context,
            max_num_batched_tokens=8192, max_num_seqs=64,
        )  # fmt: skip

    most = plan(1000).max_context
    assert plan(most).max_requests >= 1
    assert plan(most + 1).max_requests == 0


def test_a_gguf_file_is_planned_as_it_is_held(tmp_path: Path) -> None:
    path = str(write_gguf(tmp_path / "model.gguf", kind="Q8_0"))
    checkpoint = describe(Path(path))
    q = question_of(PlanArgs(path, "xeon-8592"))
    table = weight_table(checkpoint.spec, "bfloat16", dict(q.stored or ()))
    assert {str(held) for _, held in q.stored or ()} == {"int8, groups of 32"}
    assert q.memory(Split()).weights == sum(row.num_bytes for row in table)
    assert question_of(PlanArgs(path, "xeon-8592", quantize="bf16")).stored is None
    assert question_of(PlanArgs("llama-3.1-8b", "h100")).stored is None

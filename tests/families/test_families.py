"""config.json → ModelSpec: published models, both spellings of RoPE, refusals by name."""

from __future__ import annotations

import json
import subprocess
import sys
from math import log, sqrt
from typing import Any

import pytest
from tests.families.published import LLAMA3_ROPE, PUBLISHED

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families import SUPPORTED, spec_from_config, weight_map
from quire.modelspec import ModelSpec, weight_shapes
from quire.rope_spec import RopeSpec


def spec_of(name: str, **changes: Any) -> ModelSpec:
    config = {**PUBLISHED[name][0], **changes}
    return spec_from_config({key: value for key, value in config.items() if value != "absent"})


def rope_of(spec: ModelSpec, layer: int = 0) -> RopeSpec:
    rope = spec.layers[layer].attention.rope
    assert rope is not None
    return rope


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    config, num_params = PUBLISHED[name]
    assert spec_from_config(config).num_params == num_params


MINILM = {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 384, "intermediate_size": 1536,
    "num_hidden_layers": 6, "num_attention_heads": 12, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512, "type_vocab_size": 2, "vocab_size": 30522, "position_embedding_type": "absolute",
}  # fmt: skip


def test_an_encoder_as_published() -> None:
    """The pooler is not counted: no vector is made of it."""
    spec = spec_from_config(MINILM)
    assert spec.num_params == 22_713_216 - 384 * 385
    assert set(weight_map(spec).sources) == set(weight_shapes(spec))
    assert spec.kv_layout(512).groups == ()
    for key, value in (
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("hidden_act", "tanh"),
    ):
        with pytest.raises(UnsupportedModelError, match=key):
            spec_from_config({**MINILM, key: value})


def test_every_supported_architecture_is_published() -> None:
    assert {spec_of(name).architecture for name in PUBLISHED} == set(SUPPORTED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_map_covers_every_weight(name: str) -> None:
    spec = spec_of(name)
    names = weight_map(spec)
    assert list(names.sources) == list(weight_shapes(spec))
    for canonical, takes in names.sources.items():
        for take in takes:
            assert take.names, canonical
            assert all(take.shape), canonical


def test_a_family_is_imported_when_a_model_of_it_is_read() -> None:
    script = (
        "import sys; from quire.families import spec_from_config\n"
        "from tests.families.published import PUBLISHED\n"
        "spec_from_config(PUBLISHED['Llama-3.1-8B'][0])\n"
        "assert 'quire.families.llama' in sys.modules and 'quire.families.qwen' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("LFM2-1.2B", {"layer_types": ["conv", "linear_attention"] * 8}, "layer_types"),
        ("LFM2-1.2B", {"conv_L_cache": 1}, "conv_L_cache"),
        ("LFM2-8B-A1B", {"layer_types": "absent"}, "layer_types"),
        ("granite-4.0-h-tiny", {"layer_types": ["mamba"] * 40}, "layer_types"),
        ("granite-4.0-h-tiny", {"mamba_d_head": 48}, "mamba_d_head"),
        ("granite-4.0-h-tiny", {"mamba_d_state": 126}, "mamba_d_state"),
        ("granite-4.0-h-tiny", {"mamba_n_groups": 7}, "mamba_n_groups"),
        ("granite-4.0-h-tiny", {"hidden_act": "gelu"}, "hidden_act"),
        ("granite-4.0-h-tiny", {"time_step_limit": [0.1]}, "time_step_limit"),
        ("Nemotron-H-8B", {"hybrid_override_pattern": "M-M-X*"}, "hybrid_override_pattern"),
        ("Nemotron-H-8B", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("Nemotron-3-Nano-30B-A3B", {"mlp_bias": True}, "mlp_bias"),
        ("Nemotron-3-Nano-30B-A3B", {"n_group": 96}, "n_group"),
        ("Falcon-H1-0.5B", {"projectors_bias": True}, "projectors_bias"),
        ("Falcon-H1-0.5B", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers"),
        ("Kimi-Linear-48B-A3B", {"layer_types": [["linear_attention"]] * 27}, "layer_types"),
        ("Ling-3.0-Flash", {"mlp_layer_types": [{}] * 42}, "mlp_layer_types"),
        ("Qwen3-Next-80B-A3B", {"layer_types": [[]] * 48}, "layer_types"),
        ("GLM-4.7-Flash", {"mlp_layer_types": [[]] * 47}, "mlp_layer_types"),
    ],
)
def test_hybrids_name_the_key_that_is_wrong(name: str, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelLoadError, match=key):
        spec_of(name, **changes)


@pytest.mark.parametrize(
    ("name", "model_type"),
    [
        ("gemma-4-31B", "gemma4_text"),
        ("Qwen3.5-35B-A3B", "qwen3_5_moe_text"),
        ("Qwen3-Next-80B-A3B", "qwen3_next"),
    ],
)
def test_model_type_alone_names_the_family(name: str, model_type: str) -> None:
    assert spec_of(name, architectures="absent", model_type=model_type) == spec_of(name)


def test_experts_that_are_not_normalized_are_refused_where_the_family_normalizes_them() -> None:
    with pytest.raises(UnsupportedModelError, match="norm_topk_prob"):
        spec_of("Qwen3.5-35B-A3B", norm_topk_prob=False)


def test_llama2_without_rope_theta() -> None:
    assert rope_of(spec_of("Llama-2-7b")) == RopeSpec(10_000.0, 128)
    assert spec_of("Llama-2-7b").dtype == "float16"


def test_eos_lists() -> None:
    assert spec_of("Llama-3.1-8B").eos_token_ids == (128001, 128008, 128009)
    assert spec_of("Llama-2-7b").eos_token_ids == (2,)


def test_rope_parameters_equal_rope_scaling() -> None:
    old = spec_of("Llama-3.1-8B")
    new = spec_of(
        "Llama-3.1-8B",
        rope_theta="absent",
        rope_scaling="absent",
        torch_dtype="absent",
        dtype="bfloat16",
        rope_parameters={**LLAMA3_ROPE, "rope_theta": 500000.0},
    )
    assert old == new
    assert rope_of(old).kind == "llama3"
    assert rope_of(old).original_max_position == 8192


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, {"kind": "linear", "factor": 4.0}),
        ({"rope_type": "linear", "factor": 4}, {"kind": "linear", "factor": 4.0}),
        ({"type": "dynamic", "factor": 2.0}, {"kind": "dynamic", "factor": 2.0, "original_max_position": 4096}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
            {"kind": "yarn", "attention_factor": 0.1 * log(4) + 1, "original_max_position": 1024},
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
            {"kind": "yarn", "attention_factor": 1.25, "original_max_position": 4096},
        ),
    ],
)  # fmt: skip
def test_kinds_of_rope(scaling: dict[str, Any], expected: dict[str, Any]) -> None:
    rope = rope_of(spec_of("Llama-2-7b", rope_scaling=scaling))
    assert {key: getattr(rope, key) for key in expected} == expected


def test_dynamic_rope_reaches_beyond_max_position_embeddings() -> None:
    spec = spec_of("Llama-2-7b", rope_scaling={"type": "dynamic", "factor": 2.0})
    assert spec.max_position_embeddings == 8192


def test_yarn_reaches_factor_times_the_original_length() -> None:
    qwen = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert spec_of("Qwen2.5-0.5B", rope_scaling=qwen).max_position_embeddings == 131072
    assert spec_of("gpt-oss-20b").max_position_embeddings == 131072
    assert spec_of("DeepSeek-V2-Lite").max_position_embeddings == 163840


def test_longrope_derives_its_factor() -> None:
    rope = rope_of(spec_of("Phi-3-mini-128k"))
    assert (rope.kind, rope.original_max_position, rope.factor) == ("longrope", 4096, 32.0)
    assert rope.attention_factor == pytest.approx(sqrt(1 + log(32) / log(4096)))
    for old in ("su", "yarn"):
        scaling = {**PUBLISHED["Phi-3-mini-128k"][0]["rope_scaling"], "type": old}
        assert rope_of(spec_of("Phi-3-mini-128k", rope_scaling=scaling)) == rope


def test_partial_rotary() -> None:
    assert rope_of(spec_of("Phi-4-mini")).dim == 96
    assert spec_of("Phi-4-mini").layers[0].attention.head_dim == 128


def test_deepseek_folds_yarns_temperature_into_the_scale() -> None:
    attention = spec_of("DeepSeek-V3").layers[0].attention
    assert attention.scale == pytest.approx(192**-0.5 * (0.1 * log(40) + 1) ** 2)
    assert attention.rope is not None
    assert attention.rope.attention_factor == 1.0
    assert attention.rope.interleaved
    moes = [layer.mlp.moe for layer in spec_of("DeepSeek-V3").layers]
    assert moes[:3] == [None, None, None]
    assert moes[3] is not None
    assert (moes[3].num_groups, moes[3].topk_groups, moes[3].group_score) == (8, 4, "top2_sum")


def test_windows_by_layer() -> None:
    def windows(name: str, **changes: Any) -> list[int | None]:
        return [layer.attention.window for layer in spec_of(name, **changes).layers]

    assert windows("Mistral-7B-v0.1") == [4096] * 32
    assert windows("Mistral-7B-v0.1", sliding_window=None) == [None] * 32
    assert windows("gemma-2-2b") == [4096, None] * 13
    assert windows("gemma-3-1b-it")[:7] == [512] * 5 + [None, 512]
    assert windows("gpt-oss-20b")[:2] == [128, None]
    assert windows("Qwen2.5-0.5B") == [None] * 24
    sliding = windows("Qwen2.5-0.5B", use_sliding_window=True, max_window_layers=20)
    assert sliding == [None] * 20 + [32768] * 4


def test_gemma3_has_two_rotary_bases() -> None:
    spec = spec_of("gemma-3-1b-it", rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert rope_of(spec, 0) == RopeSpec(10_000.0, 256)
    assert (rope_of(spec, 5).theta, rope_of(spec, 5).kind, rope_of(spec, 5).factor) == (1e6, "linear", 8.0)
    nested = spec_of(
        "gemma-3-1b-it",
        rope_theta="absent",
        rope_local_base_freq="absent",
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
        },
    )
    assert nested == spec


def test_smollm3_layers_without_positions() -> None:
    ropes = [layer.attention.rope is not None for layer in spec_of("SmolLM3-3B").layers]
    assert ropes == [True, True, True, False] * 9


def test_granite_multipliers() -> None:
    spec = spec_of("granite-3.1-2b")
    assert (spec.embedding_scale, spec.residual_scale, spec.logits_scale) == (12.0, 0.22, 1 / 8)
    assert spec.layers[0].attention.scale == 0.015625


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("Llama-3.1-8B", {"architectures": ["LlavaForConditionalGeneration"]}, "LlavaForConditionalGeneration"),
        ("Llama-3.1-8B", {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ("gemma-3-1b-it", {"vision_config": {"hidden_size": 1}}, "vision_config"),
        ("Llama-3.1-8B", {"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "fp6"}}, "fp6"),
        ("Mixtral-8x7B", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ("Llama-3.1-8B", {"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "mrope"),
        ("Llama-3.1-8B", {"hidden_act": "relu2"}, "relu2"),
        ("gemma-2-2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Qwen2.5-0.5B", {"layer_types": ["linear_attention"] * 24}, "linear_attention"),
        ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("gpt-oss-20b", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("Llama-3.1-8B", {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ("granite-4.0-h-tiny", {"normalization_function": "layernorm"}, "normalization_function"),
        ("Falcon-H1-0.5B", {"attention_bias": True}, "attention_bias"),
        ("Nemotron-H-8B", {"sliding_window": 512}, "sliding_window"),
        ("LFM3-1.7B", {"rope_local_base_freq": 500.0}, "rope_local_base_freq"),
        ("OLMo-3-7B", {"rope_local_base_freq": 500.0}, "rope_local_base_freq"),
        ("Kimi-Linear-48B-A3B", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
        ("Kimi-Linear-48B-A3B", {"num_expert_group": 8, "use_grouped_topk": False}, "use_grouped_topk"),
        ("Ling-3.0-Flash", {"rope_interleave": False}, "rope_interleave"),
        ("Ling-3.0-Flash", {"score_function": "softmax"}, "score_function"),
        ("Ling-3.0-Flash", {"topk_method": "greedy"}, "topk_method"),
    ],
)  # fmt: skip
def test_unsupported_is_refused_by_name(name: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match="support") as caught:
        spec_of(name, **changes)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_architecture_lists_what_is_supported() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        spec_from_config({"architectures": ["FooForCausalLM"]})
    assert all(name in str(caught.value) for name in SUPPORTED)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"architectures": "absent"}, "architectures"),
        ({"hidden_size": "absent"}, "hidden_size"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"hidden_size": 4095}, "num_attention_heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 5.0}}, "high_freq_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
    ],
)
def test_wrong_values_name_the_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelLoadError, match=key):
        spec_of("Llama-3.1-8B", **changes)


def test_configs_survive_json() -> None:
    for name, (config, _) in PUBLISHED.items():
        assert spec_from_config(json.loads(json.dumps(config))) == spec_of(name)


def test_flags_that_are_null_are_off() -> None:
    """As in transformers, where a null that is not absent is false."""
    assert spec_of("Falcon-H1-0.5B").layers[0].recurrent.conv_bias
    assert not spec_of("Falcon-H1-0.5B", mamba_conv_bias=None).layers[0].recurrent.conv_bias
    assert (
        spec_of("Falcon-H1-0.5B", mamba_rms_norm=True, mamba_norm_before_gate="absent")
        .layers[0]
        .recurrent.mamba.norm
        == "norm_first"
    )
    null = spec_of("Falcon-H1-0.5B", mamba_rms_norm=True, mamba_norm_before_gate=None)
    assert null.layers[0].recurrent.mamba.norm == "gate_first"

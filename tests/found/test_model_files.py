"""Model folders: what changes tokens is applied or refused, what only sets a default never stops a load."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.found.small_tokenizer import write_tokenizer
from tests.models.tiny import CONFIG, SPEC, model_config, tensors, write_model
from tests.parity.families import make

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families import spec_from_config
from quire.models.checkpoint import describe, read_tokenizer, stored_sources
from quire.models.loader import iter_weights
from quire.rope_spec import RopeSpec

QWEN3 = {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "head_dim": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}


def rope_of(config: dict[str, Any]) -> RopeSpec:
    rope = spec_from_config(config).layers[0].attention.rope
    assert rope is not None
    return rope


def test_of_two_rope_spellings_the_one_that_says_more_counts() -> None:
    meant = rope_of({**QWEN3, "rope_theta": 1e6, "rope_scaling": YARN})
    assert meant.kind == "yarn"
    assert meant.theta == 1e6
    assert rope_of({**QWEN3, "rope_parameters": PLAIN, "rope_scaling": YARN}) == meant
    whole = {**YARN, "rope_theta": 1e6}
    for scaling in ({"rope_type": "default"}, {**YARN, "type": "yarn"}):
        assert rope_of({**QWEN3, "rope_parameters": whole, "rope_scaling": scaling}) == meant
    assert rope_of({**QWEN3, "rope_theta": 1e4, "rope_parameters": PLAIN}).theta == 1e6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_parameters": {**YARN, "factor": 2.0}, "rope_scaling": YARN},
         r"rope_parameters has factor = 2.0 and rope_scaling factor = 4.0"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}, "rope_scaling": YARN},
         r"rope_parameters has rope_type = 'linear' and rope_scaling rope_type = 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5e5}, "rope_theta = 10000, and rope_theta = 500000"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ({"is_causal": False}, "is_causal = False is not supported"),
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "llama"}, "model_type = 'llama' are two kinds"),
    ],
)  # fmt: skip
def test_keys_that_contradict_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises((ModelLoadError, UnsupportedModelError), match=said):
        spec_from_config({**QWEN3, **changes})


@pytest.mark.parametrize("names", ["absent", None, [], ["SomethingElse"], ["Unknown", "Qwen3ForCausalLM"]])
def test_model_type_says_what_architectures_does_not(names: list[str] | str | None) -> None:
    config = {**QWEN3, "model_type": "qwen3", "architectures": names}
    if names == "absent":
        del config["architectures"]
    assert spec_from_config(config) == spec_from_config(QWEN3)


@pytest.mark.parametrize("kind", ["mixtral", "olmo2", "phi3", "gpt_oss"])
def test_families_have_their_own_defaults(kind: str) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "rms_norm_eps"}
    config |= {"model_type": kind, "architectures": None, "num_local_experts": 4, "num_experts_per_tok": 2}
    assert spec_from_config(config).norm_eps == 1e-5


def test_windows_and_caps_have_defaults_that_null_removes() -> None:
    mistral = {**CONFIG, "architectures": ["MistralForCausalLM"]}
    assert spec_from_config(mistral).layers[0].attention.window == 4096
    assert spec_from_config({**mistral, "sliding_window": None}).layers[0].attention.window is None
    gemma = {**CONFIG, "architectures": ["Gemma2ForCausalLM"]}
    spec = spec_from_config(gemma)
    assert (spec.layers[0].attention.soft_cap, spec.logits_soft_cap) == (50.0, 30.0)
    spec = spec_from_config({**gemma, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (spec.layers[0].attention.soft_cap, spec.logits_soft_cap) == (None, None)


@pytest.mark.parametrize("changed", [False, True])
def test_a_stored_head_of_a_tied_model_is_used_where_it_differs(changed: bool, tmp_path: Path) -> None:
    stored = tensors()
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    stored["lm_head.weight"][-1, -1] += 1.0 if changed else 0.0
    found = describe(write_model(tmp_path, stored, tie_word_embeddings=True))
    assert found.spec.tie_word_embeddings is not changed
    assert [line for line in found.remarks if "lm_head.weight differs" in line] == list(found.remarks)
    loaded = dict(iter_weights(model_config(tmp_path, found.spec), torch.float32))
    assert ("lm_head.weight" in loaded) is changed
    if changed:
        head = loaded["lm_head.weight"]
        assert isinstance(head, torch.Tensor)
        assert torch.equal(head, stored["lm_head.weight"])


def test_own_head_of_a_tied_model_with_other_names_is_used(tmp_path: Path) -> None:
    """Nemotron-H's embedding is not called as Llama's, and transformers ties nothing there, whatever the file says."""
    make("nemotron_h_dense", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    found = describe(tmp_path)
    assert not found.spec.tie_word_embeddings
    assert "lm_head.weight differs from the embedding" in found.remarks[-1]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_decoder_without_its_prefix_loads(shards: int, tmp_path: Path) -> None:
    stored = {name.removeprefix("model."): tensor for name, tensor in tensors().items()}
    write_model(tmp_path, stored, shards=shards)
    loaded = dict(iter_weights(model_config(tmp_path), torch.float32))
    embed = loaded["embed.weight"]
    assert isinstance(embed, torch.Tensor)
    assert torch.equal(embed, stored["embed_tokens.weight"])


def test_tensors_that_no_answer_needs_are_one_line(tmp_path: Path) -> None:
    extra = {
        "v_head.summary.weight": torch.zeros(1, 16),
        "model.layers.0.self_attn.k_scale": torch.ones(1),
        "model.layers.0.self_attn.v_scale": torch.ones(1),
    }
    found = describe(write_model(tmp_path, tensors() | extra))
    (line,) = found.remarks
    assert line.startswith("3 are tensors that no answer needs")
    assert all(name in line for name in extra)
    stored_sources(tmp_path, found.spec)


@pytest.mark.parametrize(
    ("stored", "keys"),
    [
        ("model.layers.0.self_attn.q_proj.bias", ["attention_bias"]),
        ("model.layers.2.mlp.up_proj.weight", ["num_hidden_layers"]),
        ("model.layers.0.mlp.experts.0.up_proj.weight", ["num_experts"]),
    ],
)
def test_a_tensor_too_many_names_keys_to_look_at(stored: str, keys: list[str], tmp_path: Path) -> None:
    write_model(tmp_path, tensors() | {stored: torch.zeros(16)})
    with pytest.raises(ModelLoadError, match=f"{stored}.*look at.*{keys[0]}"):
        stored_sources(tmp_path, SPEC)


@pytest.mark.parametrize(
    "changes",
    [
        {
            "quantization_config": {
                "quant_method": "bitsandbytes",
                "load_in_4bit": False,
                "load_in_8bit": False,
            }
        },
        {"torch_dtype": "auto"},
        {"dtype": "auto"},
        {"eos_token_id": -1, "bos_token_id": -1},
    ],
)
def test_keys_that_set_nothing_load(changes: dict[str, Any], tmp_path: Path) -> None:
    found = describe(write_model(tmp_path, **changes))
    stored_sources(tmp_path, found.spec)
    assert found.dtype == "float32"


def test_bytes_of_bitsandbytes_that_are_hidden_in_floats_are_refused() -> None:
    config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}
    with pytest.raises(UnsupportedModelError, match="bnb_4bit_quant_storage"):
        spec_from_config({**CONFIG, "quantization_config": config})


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [(codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le")],
    ids=["utf8", "utf16"],
)
def test_byte_order_marks_are_no_part_of_a_file(mark: bytes, encoding: str, tmp_path: Path) -> None:
    write_model(tmp_path, shards=2)
    write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    plain = read_tokenizer(tmp_path).encode("ab ba", add_special_tokens=True)
    template = read_tokenizer(tmp_path).chat_templates
    texts = [path for path in tmp_path.iterdir() if path.suffix in (".json", ".jinja")]
    assert len(texts) == 6
    for path in texts:
        path.write_bytes(mark + path.read_text().encode(encoding))
    found = describe(tmp_path)
    assert found.generation.temperature == 0.5
    stored_sources(tmp_path, found.spec)
    assert read_tokenizer(tmp_path).encode("ab ba", add_special_tokens=True) == plain
    assert read_tokenizer(tmp_path).chat_templates == template


@pytest.mark.parametrize(
    ("values", "defaults", "named"),
    [
        ({"top_k": -1, "temperature": 0.7}, {"top_k": -1, "temperature": 0.7}, []),
        ({"top_p": "high", "top_k": 2.5, "min_p": 7}, {}, ["top_p", "top_k", "min_p"]),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}, []),
        (
            {"do_sample": False, "repetition_penalty": 1.2},
            {"temperature": 0.0, "repetition_penalty": 1.2},
            [],
        ),
        ({"do_sample": True, "top_k": 20.0}, {"top_k": 20}, []),
        ({"eos_token_id": [5, "x", None, -1]}, {}, ["eos_token_id"]),
        (
            {"num_beams": 4, "no_repeat_ngram_size": 0, "suppress_tokens": [3]},
            {},
            ["suppress_tokens", "num_beams"],
        ),
        ({"typical_p": 0.5, "num_beams": 1}, {"typical_p": 0.5}, []),
    ],
)
def test_generation_config_never_stops_a_load(
    values: dict[str, Any], defaults: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    found = describe(tmp_path)
    slots = found.generation.__dataclass_fields__
    assert {
        key: getattr(found.generation, key) for key in slots if getattr(found.generation, key) is not None
    } == defaults
    assert [line.split(": ")[1].split(" ")[0] for line in found.remarks] == named
    if "eos_token_id" in values:
        assert found.spec.eos_token_ids == (5, 2)


def test_a_flag_that_is_not_there_changes_nothing(tmp_path: Path) -> None:
    """tokenizer.json puts a BOS first; tokenizer_config.json says something about EOS alone."""
    for flag, ends in ((False, []), (True, [2])):
        write_tokenizer(tmp_path, add_bos_token=None, add_eos_token=flag)
        assert read_tokenizer(tmp_path).encode("ab") == [
            1,
            *read_tokenizer(tmp_path).encode("ab", False),
            *ends,
        ]

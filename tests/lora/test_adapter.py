"""Adapters on disk: what is read, and every way in which one is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families.published import PUBLISHED
from tests.lora.peft_files import ALL, PREFIX, end_tensors, linears, tensors, write_adapter
from tests.models import tiny

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families import spec_from_config
from quire.lora.adapter import read_adapter
from quire.lora.base_copies import check_copies
from quire.weight_plan import adaptable, adapter_bytes

SHAPES = linears(tiny.tensors())
Q = f"{PREFIX}model.layers.0.self_attn.q_proj"


def test_every_linear_is_found_with_its_scale(tmp_path: Path) -> None:
    stored = tensors(SHAPES, 4)
    file = read_adapter("a", write_adapter(tmp_path, stored), tiny.SPEC)
    assert set(file.parts) == set(adaptable(tiny.SPEC))
    assert {part.scale for part in file.parts.values()} == {2.0}
    assert file.adapter.name == "a"
    assert file.adapter.path == str(tmp_path)
    assert file.adapter.rank == 4
    assert adapter_bytes(tiny.SPEC, 4, "float32") == adapter_bytes(tiny.SPEC, 16, "float32")


def test_rows_are_of_the_matrix_that_a_family_makes_of_them(tmp_path: Path) -> None:
    """Qwen3.5's q_proj has each head's gate between its queries."""
    spec = spec_from_config(PUBLISHED["Qwen3.5-9B"][0])
    name = "model.layers.3.self_attn.q_proj"
    stored = tensors({name: torch.Size((2 * 16 * 256, 4096))}, 4)
    parts = read_adapter("a", write_adapter(tmp_path, stored, target_modules=[name]), spec).parts
    for matrix, first in (("q", 0), ("gate", 256)):
        rows = parts[f"layers.3.attn.{matrix}"].rows
        assert rows == tuple(range(start, start + 256) for start in range(first, 8192, 512))


def test_rank_and_alpha_patterns_and_rslora(tmp_path: Path) -> None:
    stored = tensors({n: s for n, s in SHAPES.items() if "q_proj" not in n}, 4)
    stored |= tensors({n: s for n, s in SHAPES.items() if "q_proj" in n}, 6)
    write_adapter(
        tmp_path,
        stored,
        rank_pattern={"q_proj": 6},
        alpha_pattern={r"layers\.1\.mlp\.down_proj": 10},
        use_rslora=True,
    )
    file = read_adapter("a", tmp_path, tiny.SPEC)
    assert file.parts["layers.0.attn.q"].rank == file.adapter.rank == 6
    assert file.parts["layers.0.attn.q"].scale == pytest.approx(8 / sqrt(6))
    assert file.parts["layers.1.mlp.down"].scale == pytest.approx(10 / 2)
    assert file.parts["layers.0.mlp.down"].scale == pytest.approx(8 / 2)


def test_the_key_is_that_of_the_content(tmp_path: Path) -> None:
    def key(name: str, stored: dict[str, torch.Tensor], **changes: Any) -> str:
        return read_adapter(name, write_adapter(tmp_path / name, stored, **changes), tiny.SPEC).adapter.key

    one = key("one", tensors(SHAPES, 4))
    assert key("same", tensors(SHAPES, 4)) == one
    assert key("weights", tensors(SHAPES, 4, seed=2)) != one
    assert key("config", tensors(SHAPES, 4), lora_alpha=9) != one


def test_some_modules_of_some_layers(tmp_path: Path) -> None:
    some = {name: shape for name, shape in SHAPES.items() if "layers.1" in name and "v_proj" in name}
    write_adapter(tmp_path, tensors(some, 4), target_modules=["v_proj"], layers_to_transform=[1])
    assert set(read_adapter("a", tmp_path, tiny.SPEC).parts) == {"layers.1.attn.v"}


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|k|v|o|gate|up|down)_proj"])
def test_targets_as_one_text(tmp_path: Path, targets: str) -> None:
    write_adapter(tmp_path, tensors(SHAPES, 4), target_modules=targets)
    assert len(read_adapter("a", tmp_path, tiny.SPEC).parts) == 2 * len(ALL)


def test_trained_on_the_bare_decoder(tmp_path: Path) -> None:
    """PEFT around AutoModel: the names lack "model."."""
    stored = {name.replace(f"{PREFIX}model.", PREFIX): t for name, t in tensors(SHAPES, 4).items()}
    assert len(read_adapter("a", write_adapter(tmp_path, stored), tiny.SPEC).parts) == 2 * len(ALL)


def test_fused_projections_share_an_a(tmp_path: Path) -> None:
    config = {**tiny.CONFIG, "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0}
    spec = spec_from_config(config)
    shapes = linears(tiny.tensors(config=config), ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))
    write_adapter(
        tmp_path, tensors(shapes, 4), target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
    )
    parts = read_adapter("a", tmp_path, spec).parts
    assert set(parts) == set(adaptable(spec))
    q, k, v = (parts[f"layers.0.attn.{name}"] for name in "qkv")
    assert q.a is k.a is v.a
    assert [p.rows for p in (q, k, v)] == [(range(16),), (range(16, 24),), (range(24, 32),)]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
    (
        {"modules_to_save": ["lm_head", "score"]},
        "modules_to_save has 'score': .* only embed_tokens and lm_head are",
    ),
    ({"modules_to_save": ["model.norm"]}, "modules_to_save has 'model.norm'"),
    ({"bias": "all"}, "bias = 'all'"),
    ({"lora_bias": True}, "lora_bias"),
    ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
    ({"something_new": 7}, "something_new = 7 is not known"),
]


@pytest.mark.parametrize(
    ("changes", "text"), REFUSED, ids=lambda v: next(iter(v)) if isinstance(v, dict) else ""
)
def test_more_than_plain_lora_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    write_adapter(tmp_path, tensors(SHAPES, 4), **changes)
    with pytest.raises(UnsupportedModelError, match=text):
        read_adapter("a", tmp_path, tiny.SPEC)


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"r": 0}, "r = 0"),
    ({"r": None}, "r is null"),
    ({"lora_alpha": "many"}, "lora_alpha = 'many'"),
    ({"target_modules": None}, "target_modules is missing"),
    ({"target_modules": "("}, "no regular expression"),
    ({"rank_pattern": {"q_proj": -1}}, "rank_pattern"),
    ({"alpha_pattern": {"(": 1}}, "alpha_pattern"),
    ({"r": 5}, r"lora_A.weight has shape \[4, \d+\], and rank 5"),
]


@pytest.mark.parametrize(("changes", "text"), BAD_CONFIGS, ids=str)
def test_a_wrong_configuration_names_the_key(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    write_adapter(tmp_path, tensors(SHAPES, 4), **changes)
    with pytest.raises(ModelLoadError, match=text):
        read_adapter("a", tmp_path, tiny.SPEC)


def broken(stored: dict[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    a, b = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
    if what == "no B":
        del stored[b]
    elif what == "no module":
        del stored[a], stored[b]
    elif what == "wrong inputs":
        stored[a] = torch.zeros(4, 17)
    elif what == "wrong outputs":
        stored[b] = torch.zeros(15, 4)
    elif what == "integers":
        stored[a] = torch.zeros(4, 16, dtype=torch.int8)
    elif what == "DoRA":
        stored[f"{Q}.lora_magnitude_vector"] = torch.zeros(16)
    elif what == "half an embedding":
        stored[f"{PREFIX}model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 64)
    elif what == "embedding as a linear":
        stored[f"{PREFIX}model.embed_tokens.lora_A.weight"] = torch.zeros(4, 64)
    elif what == "added tokens of LoRA":
        stored |= end_tensors(66, 16, 4, "embed_tokens")
    elif what == "added tokens":
        stored[f"{PREFIX}lm_head.base_layer.weight"] = torch.zeros(66, 16)
    elif what == "half a head":
        stored[f"{PREFIX}lm_head.lora_B.weight"] = torch.zeros(64, 4)
    elif what == "a norm":
        stored[f"{PREFIX}model.norm.weight"] = torch.zeros(16)
    elif what == "a linear":
        stored[f"{Q}.weight"] = torch.zeros(16, 16)
    elif what == "unknown":
        stored[f"{PREFIX}model.layers.0.self_attn.qq_proj.lora_A.weight"] = torch.zeros(4, 16)
    elif what == "layer beyond":
        stored[f"{PREFIX}model.layers.2.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 16)
    return stored


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("no B", r"q_proj has lora_A and no lora_B"),
        ("no module", r"layers.0.self_attn.q_proj.lora_A.weight is missing"),
        (
            "wrong inputs",
            r"q_proj.lora_A.weight has shape \[4, 17\], and rank 4 and 16 inputs .* ask for \[4, 16\]",
        ),
        ("wrong outputs", r"q_proj.lora_B.weight has shape \[15, 4\], and 16 outputs"),
        ("integers", r"q_proj.lora_A.weight is of type int8"),
        ("DoRA", "lora_magnitude_vector is there, and use_dora of adapter_config.json is false"),
        ("half an embedding", "model.embed_tokens has lora_embedding_A and no lora_embedding_B"),
        ("embedding as a linear", r"embed_tokens.lora_A.weight: model.embed_tokens has lora_embedding_A and"),
        ("added tokens of LoRA", "lora_embedding_A has 66 ids and the model 64: adapters that add tokens"),
        ("added tokens", "lm_head.base_layer.weight has 66 ids and the model 64"),
        ("half a head", "lm_head has lora_B and no lora_A"),
        ("a norm", "model.norm.weight is no part of LoRA: .* only embed_tokens and lm_head are"),
        ("a linear", "q_proj.weight is no part of LoRA"),
        ("unknown", r"no linear 'model.layers.0.self_attn.qq_proj' \(did you mean"),
        ("layer beyond", r"no linear 'model.layers.2.self_attn.q_proj'"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, what: str, text: str) -> None:
    targets = [*ALL, "qq_proj", *(["embed_tokens"] if "embedding" in what or "LoRA" in what else [])]
    targets += ["lm_head"] if "head" in what else []
    write_adapter(tmp_path, broken(tensors(SHAPES, 4), what), target_modules=targets)
    with pytest.raises(ModelLoadError, match=text):
        read_adapter("a", tmp_path, tiny.SPEC)


def test_whole_modules_and_missing_ones(tmp_path: Path) -> None:
    """modules_to_save comes before target_modules, as in PEFT, and what both name must be there."""
    head = {f"{PREFIX}lm_head.weight": torch.zeros(64, 16)}
    settings: dict[str, Any] = {"target_modules": [*ALL, "lm_head"], "modules_to_save": ["lm_head"]}
    file = read_adapter("a", write_adapter(tmp_path, tensors(SHAPES, 4) | head, **settings), tiny.SPEC)
    assert set(file.saved) == {"lm_head"}
    assert file.adapter.saved == ("lm_head",)
    assert set(file.parts) == set(adaptable(tiny.SPEC))
    plain, whole = (adapter_bytes(tiny.SPEC, 4, "float32", saved) for saved in ((), file.adapter.saved))
    assert whole - plain == 64 * 16 * 4
    with pytest.raises(ModelLoadError, match=r"lm_head.weight is missing, and modules_to_save of"):
        read_adapter("a", write_adapter(tmp_path, tensors(SHAPES, 4), **settings), tiny.SPEC)
    for end, text in (
        ("lm_head", "lm_head.lora_A.weight"),
        ("embed_tokens", "embed_tokens.lora_embedding_A"),
    ):
        write_adapter(tmp_path, tensors(SHAPES, 4), target_modules=[*ALL, end])
        with pytest.raises(ModelLoadError, match=f"{text} is missing, and target_modules"):
            read_adapter("a", tmp_path, tiny.SPEC)
    write_adapter(tmp_path, tensors(SHAPES, 4), use_dora=True)
    with pytest.raises(ModelLoadError, match=r"lora_magnitude_vector is missing, and use_dora of .* is true"):
        read_adapter("a", tmp_path, tiny.SPEC)


def test_ends_that_stay_tied_are_both_adapted(tmp_path: Path) -> None:
    """ensure_weight_tying of a tied model: naming one end names both. It has no effect on others."""
    tied = replace(tiny.SPEC, tie_word_embeddings=True)
    stored = tensors(SHAPES, 4) | end_tensors(64, 16, 4, "embed_tokens", "lm_head")
    settings = {"target_modules": [*ALL, "model.embed_tokens"], "ensure_weight_tying": True}
    write_adapter(tmp_path, stored, **settings)
    assert {"embed_tokens", "lm_head"} < set(read_adapter("a", tmp_path, tied).parts)
    assert "lm_head" not in read_adapter("a", tmp_path, tiny.SPEC).parts


ROUNDED = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_copies_must_be_the_models_own(dtype: torch.dtype, tmp_path: Path) -> None:
    """PEFT saves base_layer.weight beside LoRA of an end; training in another type rounds it."""
    (tmp_path / "model").mkdir()
    model = tiny.write_model(tmp_path / "model")
    own = tiny.tensors()["lm_head.weight"]
    ends, name = end_tensors(64, 16, 4, "lm_head"), f"{PREFIX}lm_head.base_layer.weight"
    settings = {"target_modules": [*ALL, "lm_head"]}
    for copy, same in (
        (own.to(dtype), True),
        (own.to(dtype).float(), True),
        (own.to(dtype) * 1.01, False),
    ):
        stored = tensors(SHAPES, 4) | ends | {name: copy}
        file = read_adapter("a", write_adapter(tmp_path / "a", stored, **settings), tiny.SPEC)
        assert set(file.copies) == {"lm_head"}
        if same:
            assert check_copies(file, model, tiny.SPEC) == ()
        else:
            with pytest.raises(ModelLoadError, match="its copy of lm_head differs from that of"):
                check_copies(file, model, tiny.SPEC)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no adapter_config\.json"):
        read_adapter("a", tmp_path, tiny.SPEC)
    folder = write_adapter(tmp_path, tensors(SHAPES, 4))
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ModelLoadError, match="truncated"):
        read_adapter("a", folder, tiny.SPEC)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match="pickles"):
        read_adapter("a", folder, tiny.SPEC)
    (folder / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(ModelLoadError):
        read_adapter("a", folder, tiny.SPEC)


def test_of_another_model(tmp_path: Path) -> None:
    wider = replace(tiny.SPEC, hidden_size=32)
    write_adapter(tmp_path, tensors(SHAPES, 4))
    with pytest.raises(ModelLoadError, match=r"and (rank 4 and 32 inputs|32 outputs) of .* ask for"):
        read_adapter("a", tmp_path, wider)

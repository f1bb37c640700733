"""Loading: names, shapes, types, damage; every complaint names the tensor or the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.families.published import PUBLISHED
from tests.models.tiny import CONFIG, SPEC, model_config, tensors, write_model

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families import spec_from_config, weight_map
from quire.models.loader import iter_weights
from quire.modelspec import weight_shapes


def test_single_and_sharded_are_equal(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "three").mkdir()
    one = dict(iter_weights(model_config(write_model(tmp_path / "one")), torch.float32))
    three = dict(iter_weights(model_config(write_model(tmp_path / "three", shards=3)), torch.float32))
    assert list(one) == list(weight_shapes(SPEC))
    stored = tensors()
    for name, takes in weight_map(SPEC).sources.items():
        assert torch.equal(one[name], stored[takes[0].names[0]])
        assert torch.equal(one[name], three[name])


def mapped_ranges(file: Path) -> list[range]:
    """Addresses at which this process has mapped ``file``."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    return [range(*(int(end, 16) for end in line.split()[0].split("-"))) for line in lines]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's /proc")
def test_weights_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    """No second copy where the type is right."""
    model = model_config(write_model(tmp_path))
    same = dict(iter_weights(model, torch.float32))
    ranges = mapped_ranges(tmp_path / "model.safetensors")
    for name, tensor in same.items():
        assert any(tensor.data_ptr() in where for where in ranges), name
    other = dict(iter_weights(model, torch.bfloat16))
    assert not any(other["embed.weight"].data_ptr() in where for where in ranges)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_types_convert(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    expected = tensors(stored)
    loaded = dict(iter_weights(model_config(write_model(tmp_path, expected)), wanted))
    assert torch.equal(loaded["embed.weight"], expected["model.embed_tokens.weight"].to(wanted))


def test_buffers_that_are_computed_are_ignored(tmp_path: Path) -> None:
    stored = tensors()
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    assert len(dict(iter_weights(model_config(write_model(tmp_path, stored)), torch.float32))) == len(
        weight_shapes(SPEC)
    )


def test_a_tied_head_may_be_stored(tmp_path: Path) -> None:
    spec = spec_from_config({**CONFIG, "tie_word_embeddings": True})
    write_model(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in dict(iter_weights(model_config(tmp_path, spec), torch.float32))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda s: s.pop("model.layers.1.mlp.up_proj.weight"), "model.layers.1.mlp.up_proj.weight"),
        (lambda s: s.update({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}), "model.layers.2"),
        (
            lambda s: s.update({"model.norm.weight": torch.ones(15)}),
            r"model.norm.weight has shape \[15\].*\[16\]",
        ),
        (
            lambda s: s.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(16, 16)}),
            r"k_proj.weight has shape \[16, 16\].*\[8, 16\]",
        ),
    ],
)
def test_wrong_names_and_shapes(tmp_path: Path, change: object, says: str) -> None:
    stored = tensors()
    change(stored)  # type: ignore[operator]
    with pytest.raises(ModelLoadError, match=says):
        dict(iter_weights(model_config(write_model(tmp_path, stored)), torch.float32))


def test_a_fused_tensor_of_the_wrong_size_is_found(tmp_path: Path) -> None:
    config = {**CONFIG, "architectures": ["Phi3ForCausalLM"]}
    stored = tensors(config=config)
    stored["model.layers.0.self_attn.qkv_proj.weight"] = torch.ones(48, 16)
    write_model(tmp_path, stored, architectures=["Phi3ForCausalLM"])
    with pytest.raises(ModelLoadError, match=r"qkv_proj.weight has shape \[48, 16\].*\[32, 16\]"):
        dict(iter_weights(model_config(tmp_path, spec_from_config(config)), torch.float32))


@pytest.mark.parametrize("size", [0, 4, 20, 3000])
def test_truncated_files(tmp_path: Path, size: int) -> None:
    file = write_model(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors.*download it again"):
        dict(iter_weights(model_config(tmp_path), torch.float32))


def test_damaged_headers(tmp_path: Path) -> None:
    file = write_model(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    for broken in (
        b"\xff" * 8 + whole[8:],
        whole[:8] + b"x" + whole[9:],
        whole.replace(b'"shape":[64,16]', b'"shape":[64,17]', 1),
        whole.replace(b'"data_offsets":[', b'"data_offsets":{', 1),
    ):
        file.write_bytes(broken)
        with pytest.raises(ModelLoadError, match="download it again"):
            dict(iter_weights(model_config(tmp_path), torch.float32))


def test_an_lfs_pointer_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ModelLoadError, match="git lfs pull"):
        dict(iter_weights(model_config(tmp_path), torch.float32))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"1 of 3 shards.*model-00002-of-00003"):
        dict(iter_weights(model_config(tmp_path), torch.float32))


def test_an_index_that_lies(tmp_path: Path) -> None:
    write_model(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=r"lacks model\.extra"):
        dict(iter_weights(model_config(tmp_path), torch.float32))
    content["weight_map"]["model.extra"] = "../../etc/passwd"
    index.write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match="no file name"):
        dict(iter_weights(model_config(tmp_path), torch.float32))


def test_element_types_that_are_not_read(tmp_path: Path) -> None:
    stored = tensors()
    stored["model.norm.weight"] = torch.ones(16, dtype=torch.float8_e5m2)
    with pytest.raises(UnsupportedModelError, match="F8_E5M2"):
        dict(iter_weights(model_config(write_model(tmp_path, stored)), torch.float32))


def test_folders_without_weights(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="holds no weights"):
        dict(iter_weights(model_config(tmp_path), torch.float32))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="pickles"):
        dict(iter_weights(model_config(tmp_path), torch.float32))
    for name in ("a", "b"):
        save_file(tensors(), tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelLoadError, match="2 safetensors files"):
        dict(iter_weights(model_config(tmp_path), torch.float32))


def test_a_header_of_odd_length(tmp_path: Path) -> None:
    """Bytes that are not aligned to their type are copied, not refused."""
    file = write_model(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    file.write_bytes((size + 1).to_bytes(8, "little") + whole[8 : 8 + size] + b" " + whole[8 + size :])
    loaded = dict(iter_weights(model_config(tmp_path), torch.float32))
    assert torch.equal(loaded["embed.weight"], tensors()["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", ["Mixtral-8x7B", "Qwen1.5-MoE-A2.7B", "Qwen3-30B-A3B", "DeepSeek-V3"])
def test_experts_single_or_fused(tmp_path: Path, name: str) -> None:
    """The names of the hub (one tensor an expert) and those inside transformers 5 (fused) give the same weights."""
    small = {"num_hidden_layers": 2, "hidden_size": 16, "vocab_size": 32, "intermediate_size": 24}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 8, "head_dim": 4}
    small |= {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
    small |= {"first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4}
    small |= {"qk_rope_head_dim": 4, "v_head_dim": 4, "n_group": 2, "topk_group": 1}
    small |= {"shared_expert_intermediate_size": 12}
    config = {**PUBLISHED[name][0], **small, "torch_dtype": "float32"}
    spec = spec_from_config(config)
    stored = tensors(config=config)
    fused = dict(stored)
    for canonical, takes in weight_map(spec).sources.items():
        if len(takes) == 2 and takes[0].stacked and canonical.endswith((".gate.weight", ".down.weight")):
            parts = [torch.stack([fused.pop(n) for n in takes[0].names])]
            if canonical.endswith(".gate.weight"):
                up = weight_map(spec).sources[canonical.replace("gate.weight", "up.weight")][0]
                parts.append(torch.stack([fused.pop(n) for n in up.names]))
            fused[takes[1].names[0]] = torch.cat(parts, dim=1)
        elif len(takes) == 2 and not takes[0].stacked:
            fused[takes[1].names[0]] = fused.pop(takes[0].names[0])
    assert set(fused) != set(stored)
    for folder, content in (("single", stored), ("fused", fused)):
        (tmp_path / folder).mkdir()
        write_model(tmp_path / folder, content, **config)
    single = dict(iter_weights(model_config(tmp_path / "single", spec), torch.float32))
    whole = dict(iter_weights(model_config(tmp_path / "fused", spec), torch.float32))
    for canonical, tensor in single.items():
        assert torch.equal(tensor, whole[canonical]), canonical


def test_correction_bias_stays_float32(tmp_path: Path) -> None:
    config = {**PUBLISHED["DeepSeek-V3"][0], "num_hidden_layers": 4, "hidden_size": 16, "vocab_size": 32}
    config |= {"intermediate_size": 8, "moe_intermediate_size": 4, "q_lora_rank": 8, "kv_lora_rank": 8}
    config |= {"num_attention_heads": 2, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    model = model_config(tmp_path, spec_from_config(config), load_format="random")
    types = {name: tensor.dtype for name, tensor in dict(iter_weights(model, torch.bfloat16)).items()}
    assert types.pop("layers.3.moe.correction_bias") == torch.float32
    assert set(types.values()) == {torch.bfloat16}


def test_packed_bytes_in_the_place_of_numbers(tmp_path: Path) -> None:
    stored = tensors()
    stored["model.norm.weight"] = torch.ones(16, dtype=torch.uint8)
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight is of type uint8"):
        dict(iter_weights(model_config(write_model(tmp_path, stored)), torch.float32))

"""GGUF: header, types, damage, metadata → spec. Files are made by the gguf package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.models.tiny import model_config

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.checkpoint import describe
from quire.models.gguf_file import read_gguf
from quire.models.loader import iter_weights


def write_gguf(
    path: Path, arch: str = "llama", add: Callable[[gguf.GGUFWriter], None] | None = None, kind: str = "F32"
) -> Path:
    """Write a model of two layers: 64 tokens, hidden 32, 4 / 2 heads of 8."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(64)
    writer.add_token_list(["a", "b", "é"])
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    if add is not None:
        add(writer)
    rng = np.random.default_rng(5)
    shapes = {"token_embd": (64, 32), "output_norm": (32,)}
    for i in range(2):
        shapes |= {
            f"blk.{i}.attn_norm": (32,), f"blk.{i}.ffn_norm": (32,), f"blk.{i}.attn_q": (32, 32),
            f"blk.{i}.attn_k": (16, 32), f"blk.{i}.attn_v": (16, 32), f"blk.{i}.attn_output": (32, 32),
            f"blk.{i}.ffn_gate": (64, 32), f"blk.{i}.ffn_up": (64, 32), f"blk.{i}.ffn_down": (32, 64),
        }  # fmt: skip
    for name, shape in shapes.items():
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1 or kind == "F32":
            writer.add_tensor(f"{name}.weight", values)
        else:
            of = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("kind", "worst"), [("F32", 0.0), ("F16", 2e-3), ("BF16", 2e-2), ("Q8_0", 2e-2)])
def test_element_types(tmp_path: Path, kind: str, worst: float) -> None:
    exact = describe(write_gguf(tmp_path / "exact.gguf"))
    found = describe(write_gguf(tmp_path / "model.gguf", kind=kind))
    assert found.dtype == {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q8_0": "q8_0"}[kind]
    expected = dict(iter_weights(model_config(exact.path, exact.spec), torch.float32))
    loaded = dict(iter_weights(model_config(found.path, found.spec), torch.float32))
    reader = gguf.GGUFReader(found.path)
    for tensor in reader.tensors:
        if tensor.name == "blk.0.ffn_up.weight":
            oracle = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
            assert torch.equal(loaded["layers.0.mlp.up.weight"], oracle.view(64, 32))
    for name, value in expected.items():
        assert (loaded[name] - value).abs().max() <= worst * 4, name


def test_metadata_becomes_a_spec(tmp_path: Path) -> None:
    found = describe(write_gguf(tmp_path / "model.gguf"))
    spec = found.spec
    assert (found.kind, found.tokenizer) == ("gguf", tmp_path / "model.gguf")
    assert (spec.family, spec.vocab_size, spec.norm_eps, spec.max_position_embeddings) == (
        "llama",
        64,
        1e-5,
        128,
    )
    assert spec.tie_word_embeddings
    assert spec.eos_token_ids == (2, 5)
    assert spec.layers[0].attention.head_dim == 8
    assert describe(tmp_path).spec == spec  # a folder with one file


def test_q_and_k_rows_are_put_back(tmp_path: Path) -> None:
    found = describe(write_gguf(tmp_path / "model.gguf"))
    stored = {t.name: t.data for t in gguf.GGUFReader(found.path).tensors}
    loaded = dict(iter_weights(model_config(found.path, found.spec), torch.float32))
    rows = torch.from_numpy(stored["blk.0.attn_k.weight"].copy()).view(2, 4, 2, 32)  # head, pair, which half
    expected = torch.cat([torch.cat((rows[h, :, 0], rows[h, :, 1])) for h in range(2)])
    assert torch.equal(loaded["layers.0.attn.k.weight"], expected)


def test_factors_of_llama3_come_from_a_tensor(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.5, 4.0, 8.0], dtype=np.float32)
    path = write_gguf(tmp_path / "model.gguf", add=lambda w: w.add_tensor("rope_freqs.weight", factors))
    rope = describe(path).spec.layers[0].attention.rope
    assert rope is not None
    assert (rope.kind, rope.long_factor, rope.attention_factor) == ("longrope", (1.0, 1.5, 4.0, 8.0), 1.0)
    dict(iter_weights(model_config(path, describe(path).spec), torch.float32))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"architecture 'mamba'.*llama, qwen2"):
        describe(write_gguf(tmp_path / "a.gguf", "mamba"))

    def another_type(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("x", np.zeros(18, dtype=np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q1_0)

    with pytest.raises(UnsupportedModelError, match=r"b\.gguf: x is of type Q1_0.*Q4_K"):
        describe(write_gguf(tmp_path / "b.gguf", add=another_type))
    with pytest.raises(ModelLoadError, match=r"expert_used_count"):
        describe(write_gguf(tmp_path / "c.gguf", add=lambda w: w.add_expert_count(8)))
    with pytest.raises(ModelLoadError, match=r"d\.gguf is one of 3 parts.*d-00001-of-00003\.gguf"):
        describe(write_gguf(tmp_path / "d.gguf", add=lambda w: w.add_uint16("split.count", 3)))
    with pytest.raises(ModelLoadError, match=r"4 GGUF files \(a.gguf, b.gguf"):
        describe(tmp_path)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (139, "IQ4_K, a type of ik_llama.cpp, which"),
        (344, "number 344, a type of ik_llama.cpp in its own order of rows"),
        (77, "number 77, which is damaged or of a newer ggml"),
        (15, "Q8_K, which is not supported"),
    ],
)
def test_types_that_are_not_read_are_named(number: int, message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    data = bytearray(path.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert data[at : at + 4] == bytes(4)
    data[at : at + 4] = number.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(
        UnsupportedModelError, match=r"model\.gguf: blk\.1\.ffn_up\.weight is of type " + message
    ):
        describe(path)


def test_blocks_that_do_not_divide_a_row_are_damage(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    data = bytearray(path.read_bytes())
    name = b"blk.1.ffn_up.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    data[at : at + 4] = (12).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(
        ModelLoadError, match=r"model\.gguf: blk\.1\.ffn_up\.weight has shape .*no whole number of q4_k"
    ):
        describe(path)


def test_damage(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    whole = path.read_bytes()
    for cut in (0, 3, 10, 30, 200, 900, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelLoadError, match=r"model\.gguf.*download it again"):
            read_gguf(path)
    path.write_bytes(b"GGUF" + b"\xff" * 20 + whole[24:])
    with pytest.raises(ModelLoadError):
        read_gguf(path)
    path.write_bytes(whole[:16] + b"\xff" * 8 + whole[24:])  # an absurd number of keys
    with pytest.raises(ModelLoadError, match="cannot be read"):
        read_gguf(path)


def test_stories260k_from_gguf_equals_safetensors(shared_data: Path) -> None:
    folder = shared_data / "models" / "stories260K"
    original, f32 = describe(folder / "hf"), describe(folder / "stories260K-f32.gguf")
    assert f32.spec == original.spec
    weights = dict(iter_weights(model_config(original.path, original.spec), torch.float32))
    for name, tensor in dict(iter_weights(model_config(f32.path, f32.spec), torch.float32)).items():
        assert torch.equal(tensor, weights[name]), name
    q8 = describe(folder / "stories260K-q8_0.gguf")
    assert q8.dtype == "q8_0"
    for name, tensor in dict(iter_weights(model_config(q8.path, q8.spec), torch.float32)).items():
        assert (tensor - weights[name]).abs().max() <= weights[name].abs().max() / 127, name

"""GGUF files of `quire quantize`: readers decode what was rounded, and what the file cannot say is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.found.small_tokenizer import write_tokenizer
from tests.parity.families import make

from quire.clock import WallClock
from quire.errors import ConfigError, ModelLoadError, UnsupportedModelError
from quire.models.checkpoint import describe, read_tokenizer, stored_sources
from quire.models.gguf_file import read_gguf
from quire.quant.ggml_blocks import decode_rows
from quire.quant.stored import dequantize
from quire_lab.quantize import folder as out_folder
from quire_lab.quantize.args import QuantizeArgs
from quire_lab.quantize.gguf import output
from quire_lab.quantize.gguf.blocks import block_bytes
from quire_lab.quantize.gguf.grids import SCHEMES
from quire_lab.quantize.gguf.vocabulary import vocabulary
from quire_lab.quantize.gptq import gptq, output_error
from quire_lab.quantize.rounding import round_to_nearest
from quire_lab.quantize.run import quantize

TEXT = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. " * 4
# What the tiny models have that GGUF has no key for.
WHOLE: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None}, "qwen2": {"use_sliding_window": False}, "mixtral": {"sliding_window": None},
    "gemma2": {"query_pre_attn_scalar": 16}, "gemma3": {"query_pre_attn_scalar": 16},
}  # fmt: skip
FAMILIES = (
    "llama", "llama_bias_tied", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "olmo2", "granite", "mixtral",
    "qwen3_moe", "qwen2_moe",
)  # fmt: skip


def rows(count: int = 40, inputs: int = 512) -> torch.Tensor:
    weight = torch.randn(count, inputs, generator=torch.Generator().manual_seed(7))
    weight *= torch.logspace(-4, 1, count).unsqueeze(1)
    weight[0] = 0.0
    weight[1] = 0.25
    weight[2, ::7] *= 50.0
    weight[3] = weight[3].abs()
    weight[4] = -weight[4].abs()
    return weight


def dequantized(raw: torch.Tensor, name: str) -> np.ndarray:
    return gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[name.upper()])


@pytest.mark.parametrize("name", SCHEMES)
def test_gguf_package_decodes_the_numbers_that_were_rounded(name: str) -> None:
    weight = rows()
    for importance in (None, torch.linspace(0.0, 4.0, weight.shape[1])):
        rounded = round_to_nearest(weight, SCHEMES[name], importance)
        raw, wanted = block_bytes(rounded), rounded.expand()
        assert torch.isfinite(wanted).all()
        assert np.array_equal(dequantized(raw, name), wanted.numpy())
        assert torch.equal(dequantize(decode_rows(raw, name)), wanted)


@pytest.mark.parametrize("name", ["q8_0", "q5_0", "q4_0", "q5_1", "q4_1"])
def test_error_is_not_above_that_of_the_gguf_package(name: str) -> None:
    weight = rows()[5:]
    ours = round_to_nearest(weight, SCHEMES[name]).expand()
    kind = gguf.GGMLQuantizationType[name.upper()]
    theirs = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))
    assert (ours - weight).square().sum() < (theirs - weight).square().sum()


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "iq4_xs", "q5_1", "iq4_nl"])
def test_gptq_stays_on_the_grid_of_the_blocks(name: str) -> None:
    weight = rows()[5:]
    inputs = torch.randn(600, 512, generator=torch.Generator().manual_seed(8)) @ torch.randn(
        512, 512, generator=torch.Generator().manual_seed(9)
    )
    gram = inputs.t() @ inputs / len(inputs)
    rounded = gptq(weight, gram, SCHEMES[name])
    assert np.array_equal(dequantized(block_bytes(rounded), name), rounded.expand().numpy())
    nearest = round_to_nearest(weight, SCHEMES[name], gram.diagonal())
    assert output_error(weight, rounded.expand(), gram) < 0.7 * output_error(weight, nearest.expand(), gram)


def model_of(folder: Path, family: str = "llama", **changes: Any) -> Path:
    model = folder / "model"
    make(
        family, model, **{"hidden_size": 64, "moe_intermediate_size": 32, **WHOLE.get(family, {}), **changes}
    )
    return write_tokenizer(model)


def run(model: Path, name: str = "out", **flags: Any) -> tuple[Path, dict[str, Any]]:
    out = model.parent / name
    values = {"gguf_type": "q8_0", "format": "gguf", **flags}
    report = quantize(str(model), QuantizeArgs(out=str(out), **values), WallClock())
    (file,) = out.glob("*.gguf")
    return file, report


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_as_its_source(tmp_path: Path, family: str) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    file, report = run(model_of(tmp_path, family), text=str(tmp_path / "text.txt"))
    assert report["fidelity"]["kl_mean"] < 0.25
    assert report["bytes"] == file.stat().st_size


def test_file_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    model = model_of(tmp_path, "qwen3")
    file, _ = run(model)
    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    source = weights_of(model)
    for part in ("q", "k", "v"):
        found = tensors[f"blk.1.attn_{part}.weight"]
        wanted = round_to_nearest(source[f"layers.1.attn.{part}.weight"], SCHEMES["q8_0"]).expand()
        assert np.array_equal(gguf.quants.dequantize(found.data, found.tensor_type), wanted.numpy())
    assert np.array_equal(tensors["output_norm.weight"].data, source["norm.weight"].numpy())
    assert reader.fields["general.architecture"].contents() == "qwen3"
    assert reader.fields["tokenizer.ggml.tokens"].contents()[:3] == ["<pad>", "<s>", "</s>"]


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    names = {"embed_tokens.weight": "embed.weight", "norm.weight": "norm.weight"}
    weights = load_file(model / "model.safetensors")
    found = {}
    for name, weight in weights.items():
        short = name.removeprefix("model.")
        for theirs, ours in (("self_attn.", "attn."), ("_proj.", ".")):
            short = short.replace(theirs, ours)
        found[names.get(short, short)] = weight
    return found


def test_run_that_was_ended_writes_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(tmp_path)
    whole, _ = run(model, "whole")
    with monkeypatch.context() as patched:
        patched.setattr(output, "write_file", full_disk)
        with pytest.raises(ConfigError, match=r"gguf cannot be written: .*No space left"):
            run(model)
        assert not (tmp_path / "out").exists()
    with monkeypatch.context() as patched:
        patched.setattr(out_folder, "write_safetensors", full_disk)
        file, _ = run(model)
    assert file.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in file.parent.iterdir()) == [file.name, out_folder.REPORT]
    assert not list(tmp_path.glob("*.partial"))


def full_disk(*args: object) -> None:
    raise OSError(28, "No space left on device")


def test_errors_are_weighted_by_what_the_text_multiplies(tmp_path: Path) -> None:
    model, text = model_of(tmp_path), tmp_path / "text.txt"
    text.write_text(TEXT)
    flags = {"gguf_type": "q4_0", "calib": str(text), "calib_samples": 4, "calib_tokens": 32}
    errors = {}
    for method in ("imatrix", "gptq"):
        _, report = run(model, method, method=method, **flags)
        errors[method] = sum(entry["output_error"] for entry in report["matrices"])
    assert errors["gptq"] < 0.8 * errors["imatrix"]
    with pytest.raises(ConfigError, match="the method rtn runs the model on no text"):
        run(model, "rtn", method="rtn", **flags)


def imatrix(path: Path, values: dict[str, torch.Tensor], *, older: bool) -> Path:
    """Write the values as llama.cpp does, in 3 chunks of 2 rows each."""
    if older:
        entries = []
        for name, value in values.items():
            numbers = (3 * value.flatten()).tolist()
            head = struct.pack(f"<i{len(name)}sii", len(name), name.encode(), 3, len(numbers))
            entries.append(head + struct.pack(f"<{len(numbers)}f", *numbers))
        path.write_bytes(struct.pack("<i", len(entries)) + b"".join(entries) + struct.pack("<i", 3))
        return path
    writer = gguf.GGUFWriter(path, "imatrix")
    for name, value in values.items():
        writer.add_tensor(f"{name}.in_sum2", (6 * value).numpy())
        writer.add_tensor(f"{name}.counts", np.full((len(value), 1), 6, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("older", [True, False])
def test_importance_matrix_of_llama_cpp_weights_errors(tmp_path: Path, older: bool) -> None:
    model = model_of(tmp_path, "qwen3_moe")
    generator = torch.Generator().manual_seed(5)
    values = {
        "blk.1.attn_q.weight": torch.rand(1, 64, generator=generator) ** 6,
        "blk.1.ffn_up_exps.weight": torch.rand(6, 64, generator=generator) ** 6,
    }
    path = imatrix(tmp_path / "imatrix", values, older=older)
    file, report = run(model, gguf_type="q4_0", method="imatrix", imatrix=str(path))
    assert any("are not in imatrix, for example blk.0.attn_q.weight" in line for line in report["remarks"])
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    source = load_file(model / "model.safetensors")
    for index in (0, 5):
        weight = source[f"model.layers.1.mlp.experts.{index}.up_proj.weight"]
        wanted = round_to_nearest(weight, SCHEMES["q4_0"], values["blk.1.ffn_up_exps.weight"][index]).expand()
        found = tensors["blk.1.ffn_up_exps.weight"]
        assert np.allclose(gguf.quants.dequantize(found.data, found.tensor_type)[index], wanted.numpy())
    plain = round_to_nearest(source["model.layers.0.self_attn.q_proj.weight"], SCHEMES["q4_0"]).expand()
    found = tensors["blk.0.attn_q.weight"]
    assert np.array_equal(gguf.quants.dequantize(found.data, found.tensor_type), plain.numpy())


def test_wrong_importance_matrix_is_named(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    cases = {
        "it is of another model": {"blk.0.attn_q.weight": torch.ones(1, 32)},
        "has none of this model's matrices": {"blk.0.other.weight": torch.ones(1, 64)},
        "negative or no finite number": {"blk.0.attn_q.weight": torch.full((1, 64), float("nan"))},
    }
    for index, (words, values) in enumerate(cases.items()):
        path = imatrix(tmp_path / f"imatrix{index}", values, older=index == 1)
        with pytest.raises(ConfigError, match=words):
            run(model, method="imatrix", imatrix=str(path))
    (tmp_path / "cut").write_bytes((tmp_path / "imatrix1").read_bytes()[:60])
    with pytest.raises(ConfigError, match="cut is no importance matrix"):
        run(model, method="imatrix", imatrix=str(tmp_path / "cut"))
    with pytest.raises(ConfigError, match="imatrix needs method = 'imatrix'"):
        run(model, method="gptq", imatrix=str(path))


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen2", "llama2", "mistral", "phi-3-mini"])
def test_vocabulary_encodes_as_the_folder_does(shared_data: Path, name: str) -> None:
    source = read_tokenizer(shared_data / "tokenizers" / name)
    keys = vocabulary(source, source.vocab_size, source.eos_token_ids, name)
    assert keys["tokenizer.ggml.add_bos_token"] == (source.encode("")[:1] == [source.bos_token_id])
    assert keys["tokenizer.ggml.eos_token_id"] in source.eos_token_ids
    assert len(keys["tokenizer.ggml.tokens"]) == source.vocab_size


def test_a_normalization_that_no_name_stands_for_is_refused(shared_data: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    read_tokenizer(shared_data / "tokenizers" / "gpt2").save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "NFC"}}))
    tokenizer = read_tokenizer(tmp_path)
    with pytest.raises(UnsupportedModelError, match="would make other tokens"):
        vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids, "gpt-neox")


def test_chat_template_and_ends_are_in_the_file(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    file, _ = run(model)
    ours, theirs = read_tokenizer(file), read_tokenizer(model)
    assert ours.chat_templates == theirs.chat_templates
    assert ours.eos_token_ids == theirs.eos_token_ids
    assert ours.encode(TEXT) == theirs.encode(TEXT)
    assert describe(file).spec.eos_token_ids == describe(model).spec.eos_token_ids


def test_mixes_give_v_and_down_of_some_layers_more_bits(tmp_path: Path) -> None:
    model = model_of(tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=9)
    tensors = read_gguf(run(model, gguf_type="q4_k_m", keep=("layers.3.self_attn.q_proj=bf16",))[0]).tensors
    more = {i for i in range(9) if tensors[f"blk.{i}.ffn_down.weight"].dtype == "q6_k"}
    assert more == {0, 3, 6, 7, 8}
    assert {i for i in range(9) if tensors[f"blk.{i}.attn_v.weight"].dtype == "q6_k"} == more
    assert {tensors[f"blk.{i}.ffn_up.weight"].dtype for i in range(9)} == {"q4_k"}
    assert tensors["blk.3.attn_q.weight"].dtype == "float32"
    assert tensors["output.weight"].dtype == "q6_k"
    _, sources = stored_sources(model, describe(model).spec)
    assert len(tensors) == len(sources)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"bits": 4}, "say the same thing"),
        ({"gguf_type": None, "bits": 3}, "bits = 3: gguf is written with 8, 6, 5, 4 bits"),
        ({"group_size": 64}, "group_size"),
        ({"method": "smoothquant"}, "or activations"),
        ({"format": "gptq"}, "needs format = 'gguf'"),
    ],
)
def test_wrong_flags_are_named(tmp_path: Path, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(model_of(tmp_path), **flags)


def test_what_gguf_cannot_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"cannot say that layers\[1\].attn.window is 16"):
        run(model_of(tmp_path, "qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=1))
    (tmp_path / "other").mkdir()
    with pytest.raises((UnsupportedModelError, ModelLoadError), match="is not written as GGUF"):
        run(model_of(tmp_path / "other", "gemma3", query_pre_attn_scalar=12))

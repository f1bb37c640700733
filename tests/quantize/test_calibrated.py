"""Calibrated runs: the layers compute what the engine computes, runs go on where they ended, formats are read back."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.quantize.test_run import decoded, stored

from quire.args import EngineArgs
from quire.clock import WallClock
from quire.device import detect_device
from quire.errors import ConfigError
from quire.models.hub import quill_path
from quire_lab.eval.model import LoadedModel, find_model
from quire_lab.quantize import folder as out_folder
from quire_lab.quantize.args import QuantizeArgs
from quire_lab.quantize.calibration import calibration_ids
from quire_lab.quantize.forward import LoadedLayer, first_hidden
from quire_lab.quantize.gptq import gptq
from quire_lab.quantize.rounding import round_to_nearest
from quire_lab.quantize.run import quantize
from quire_lab.quantize.scheme import Scheme

FEW = {"calib_samples": 3, "calib_tokens": 64}


@pytest.fixture(scope="module")
def quill() -> Path:
    return quill_path("quill-draft")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The old house stood at the end of the lane, and nobody had lived in it for years. " * 20)
    return path


def run(model: Path, out: Path, **flags: Any) -> dict[str, Any]:
    return quantize(str(model), QuantizeArgs(out=str(out), **{**FEW, **flags}), WallClock())


def test_layers_compute_what_the_engine_computes(quill: Path) -> None:
    found = find_model(EngineArgs(model=str(quill), dtype="float32", packed_cache="off"), detect_device())
    ids = calibration_ids(found.tokenizer, None, 2, 50)
    hidden = first_hidden(found.config, ids)
    for layer in range(found.config.model.spec.num_layers):
        hidden = LoadedLayer(found.config, layer, ids).run(hidden)
    whole = LoadedModel(found, 50, WallClock())
    weight = stored(quill)["model.norm.weight"].float()
    for index, row in enumerate(ids.tolist()):
        x = hidden[index * 50 : index * 50 + 49]
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + found.config.model.spec.norm_eps) * weight
        assert torch.allclose(x, whole.hidden(row), rtol=1e-3, atol=1e-3)
    whole.close()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_run_that_was_ended_writes_the_same_bytes(
    quill: Path, tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(quill, tmp_path / "whole", method=method)
    write, shards = out_folder.write_safetensors, []

    def full(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        if path.name.startswith("model-00002"):
            shards.append(path)
            if len(shards) == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
        write(path, tensors)

    monkeypatch.setattr(out_folder, "write_safetensors", full)
    with pytest.raises(ConfigError, match="No space left"):
        run(quill, tmp_path / "out", method=method)
    run(quill, tmp_path / "out", method=method)
    for path in (tmp_path / "whole").iterdir():
        if path.name != out_folder.REPORT:
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize(("target", "symmetric"), [("gptq", True), ("gptq", False), ("awq", False)])
def test_other_formats_hold_the_same_numbers(
    quill: Path, tmp_path: Path, target: str, symmetric: bool
) -> None:
    run(quill, tmp_path / "out", method="rtn", format=target, symmetric=symmetric, group_size=32)
    source, matrices = stored(quill), decoded(tmp_path / "out")
    assert matrices
    for name, matrix in matrices.items():
        _, layer, _, part, _ = name.split(".")
        block = "self_attn" if part in "qkvo" else "mlp"
        weight = source[f"model.layers.{layer}.{block}.{part}_proj.weight"].float()
        assert torch.equal(matrix, round_to_nearest(weight, Scheme(4, 32, symmetric)).expand()), name


def test_gptq_sees_what_the_first_layer_reads(quill: Path, tmp_path: Path) -> None:
    run(quill, tmp_path / "out", method="gptq", group_size=32)
    assert not (tmp_path / "out" / "golden.json").exists(), "it has the tokens of other weights"
    found = find_model(EngineArgs(model=str(quill), packed_cache="off"), detect_device())
    ids = calibration_ids(found.tokenizer, None, 3, 64)
    source, x = stored(quill), first_hidden(found.config, ids).float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + found.config.model.spec.norm_eps)
    rows = x * scale * source["model.layers.0.input_layernorm.weight"].float()
    wanted = gptq(
        source["model.layers.0.self_attn.k_proj.weight"].float(), rows.t() @ rows / len(rows), Scheme(4, 32)
    )
    made = decoded(tmp_path / "out")["layers.0.attn.k.weight"]
    # The engine's rows are bf16, so some integers differ; of those rounded to nearest half do.
    assert (made != wanted.expand()).float().mean() < 0.15


@pytest.mark.parametrize("method", ["rtn", "fp8"])
def test_eight_bits_lose_little(quill: Path, tmp_path: Path, text: Path, method: str) -> None:
    report = run(quill, tmp_path / "out", method=method, bits=8, text=str(text))
    assert 0.0 < report["fidelity"]["kl_mean"] < 0.02
    source, matrices = stored(quill), decoded(tmp_path / "out")
    weight = source["model.layers.0.mlp.down_proj.weight"].float()
    error = (matrices["layers.0.mlp.down.weight"] - weight).norm() / weight.norm()
    assert error < (0.03 if method == "fp8" else 0.01)


def test_kl_is_measured_and_may_refuse(quill: Path, tmp_path: Path, text: Path) -> None:
    flags = {"method": "smoothquant", "text": str(text)}
    with pytest.raises(ConfigError, match=r"the mean KL is .* nothing is written"):
        run(quill, tmp_path / "out", max_kl=1e-9, **flags)
    assert not (tmp_path / "out").exists()
    report = run(quill, tmp_path / "out", max_kl=1.0, **flags)
    assert 0.0 < report["fidelity"]["kl_mean"] < 0.02
    kept = json.loads((tmp_path / "out" / out_folder.REPORT).read_text())
    assert kept["fidelity"]["kl_mean"] == report["fidelity"]["kl_mean"]


def test_text_shorter_than_a_sequence_is_refused(quill: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    with pytest.raises(ConfigError, match=r"short\.txt has \d+ tokens, and one sequence needs 64"):
        run(quill, tmp_path / "out", method="gptq", calib=str(short))


def test_chats_are_calibration_text(quill: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    line = {
        "messages": [{"role": "user", "content": "word " * 50}, {"role": "assistant", "content": "yes " * 50}]
    }
    chats.write_text(json.dumps(line) + "\n" + json.dumps(line))
    found = find_model(EngineArgs(model=str(quill)), detect_device())
    assert calibration_ids(found.tokenizer, str(chats), 4, 20).shape == (4, 20)
    chats.write_text('{"messages": [{"role": "user"}]}')
    with pytest.raises(ConfigError, match=r"chats\.jsonl:1"):
        calibration_ids(found.tokenizer, str(chats), 4, 20)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"format": "awq", "bits": 8}, "awq is written with 4 bits"),
        ({"format": "awq", "symmetric": True}, "awq has a zero point per group"),
        ({"method": "smoothquant", "bits": 4}, "smoothquant' with activations has 8 bits"),
        ({"method": "gptq", "activations": True, "group_size": 32}, "with activations has 8 bits"),
        ({"method": "smoothquant", "format": "gptq"}, "no activations"),
        ({"max_kl": 0.1}, "max_kl needs text"),
    ],
)
def test_format_that_cannot_hold_the_scheme_is_refused(
    quill: Path, tmp_path: Path, flags: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        run(quill, tmp_path / "out", **flags)

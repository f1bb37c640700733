"""`--rotate`: the rotated model is the same model, and an outlier costs less after it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.tiny import CONFIG as TINY
from tests.models.tiny import tensors, write_model
from tests.quantize.test_run import run, stored
from typer.testing import CliRunner

from quire.args import EngineArgs
from quire.clock import WallClock
from quire.device import detect_device
from quire.errors import ConfigError
from quire.models.hub import quill_path
from quire_lab.cli.quantize import quantize_app
from quire_lab.eval.model import LoadedModel, find_model
from quire_lab.quantize.rotate import Rotation, rotated_source
from quire_lab.quantize.rounding import round_to_nearest
from quire_lab.quantize.scheme import Scheme
from quire_lab.quantize.source import read_source

SHAPE: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 4, "head_dim": 24,
}  # fmt: skip
QWEN = {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True}


def model_of(folder: Path, changes: dict[str, Any]) -> Path:
    folder.mkdir()
    config = {**SHAPE, **changes}
    weights = tensors(torch.float32, {**TINY, **config})
    for name, weight in weights.items():
        if "norm" not in name:
            weight *= 0.1
    for file in quill_path("quill").glob("tokenizer*"):
        shutil.copy(file, folder)
    return write_model(folder, weights, **config)


def logits(model: Path) -> torch.Tensor:
    found = find_model(EngineArgs(model=str(model), dtype="float32", packed_cache="off"), detect_device())
    loaded = LoadedModel(found, 32, WallClock())
    result = loaded.logits(loaded.hidden(list(range(3, 33)))).clone()
    loaded.close()
    return result


@pytest.mark.parametrize("changes", [{}, QWEN], ids=["llama", "biases, tied"])
def test_rotated_model_is_the_same_model(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = model_of(tmp_path / "model", changes)
    source = read_source(path)
    rotated_source(source, tmp_path / "rotated", ())
    before, after = stored(path), stored(tmp_path / "rotated")
    assert "lm_head.weight" in after
    for name, tensor in after.items():
        if "norm" in name:
            assert (tensor == 1.0).all(), name
        elif name in before and not name.endswith("k_proj.bias") and not name.endswith("q_proj.bias"):
            assert (tensor - before[name]).abs().max() > 1e-3 * before[name].abs().max(), name
    wanted = logits(path)
    assert torch.allclose(logits(tmp_path / "rotated"), wanted, atol=2e-5 * wanted.abs().max().item())


def test_rotation_spreads_an_outlier(tmp_path: Path) -> None:
    """A layer whose answer is known: one input of a matrix has large weights, which decide the step of each row."""
    path = model_of(tmp_path / "model", {"hidden_size": 256, "head_dim": 64})
    source, scheme = read_source(path), Scheme(4, None)
    (gate,) = [m for m in source.matrices if m.name.endswith("layers.0.mlp.gate_proj")]
    weights = stored(path)
    weights[gate.tensor][:, 5] *= 20.0
    weights["model.layers.0.post_attention_layernorm.weight"].fill_(1.0)
    write_model(path, weights, **{**SHAPE, "hidden_size": 256, "head_dim": 64})
    plain = weights[gate.tensor]
    rotated = Rotation(read_source(path), ()).layer(0)[gate.tensor]
    rows = torch.randn(300, 256, generator=torch.Generator().manual_seed(1))
    rows[:, 5] /= 20.0

    def error(weight: torch.Tensor, x: torch.Tensor) -> float:
        return (x @ (round_to_nearest(weight, scheme).expand() - weight).t()).square().sum().item()

    same = rows @ torch.linalg.lstsq(plain, rotated).solution  # what it reads instead of the rows
    assert torch.allclose(same @ rotated.t(), rows @ plain.t(), atol=1e-3)
    assert error(plain, rows) > 5.0 * error(rotated, same)


def test_rotated_files_are_read_and_kept_matrices_stay_small(tmp_path: Path) -> None:
    path = model_of(tmp_path / "model", {})
    out, report = run(path, rotate=True, keep=("layers.1.mlp.down_proj",))
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}
    assert not list(out.glob("*rotated"))
    assert report["bytes_source"] == sum(t.nbytes for t in stored(path).values())
    wanted, found = logits(path), logits(out)
    assert (found - wanted).square().mean() < 0.2 * wanted.square().mean()


def test_what_cannot_be_rotated_is_refused(tmp_path: Path) -> None:
    path = model_of(tmp_path / "model", {"architectures": ["Olmo2ForCausalLM"]})
    with pytest.raises(ConfigError, match="norms behind a block"):
        run(path, rotate=True)


def test_refused_flags_leave_no_rotated_weights_behind(tmp_path: Path) -> None:
    """Another model would be made of them, under the same ``--out``."""
    path = model_of(tmp_path / "model", {})
    with pytest.raises(ConfigError, match="written with 2, 3, 4 or 8 bits"):
        run(path, rotate=True, bits=5)
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_rotated_weights_of_one_model_are_not_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = model_of(tmp_path / "first", {}), model_of(tmp_path / "second", QWEN)
    with monkeypatch.context() as patch:
        patch.setattr("quire_lab.quantize.run._write_layers", lambda *_: 1 / 0)  # ended after it was rotated
        with pytest.raises(ZeroDivisionError):
            run(first, rotate=True)
    with pytest.raises(ConfigError, match="of another model; delete it"):
        run(second, rotate=True)
    assert [path.name for path in (tmp_path / "out.partial").glob("*rotated")] == ["first-rotated"]
    shutil.rmtree(tmp_path / "out.partial")
    out, _ = run(second, rotate=True)
    assert "model.layers.0.self_attn.q_proj.bias" in stored(out)


def test_command_writes_a_rotated_gguf_file_by_type(tmp_path: Path) -> None:
    path, out = model_of(tmp_path / "model", {}), tmp_path / "out"
    flags = ["--rotate", "--format", "gguf", "--gguf-type", "q8_0", "--out", str(out)]
    done = CliRunner().invoke(quantize_app, [str(path), *flags])
    assert done.exit_code == 0, done.output
    wanted = logits(path)
    result = logits(out / "model-rotated-Q8_0.gguf")
    assert (result - wanted).square().mean() < 0.01 * wanted.square().mean()

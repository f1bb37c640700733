"""`quire quantize`: what is written is what was rounded, nothing is lost, and a run that was ended is gone on with."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.tiny import CONFIG as TINY
from tests.models.tiny import tensors, write_model
from typer.testing import CliRunner

from quire.clock import WallClock
from quire.errors import ConfigError, ModelLoadError
from quire.kernels.linear.reference import scaled_to_fp8
from quire.models.checkpoint import describe, stored_sources
from quire.models.stored_weights import open_quantized
from quire.parallel.shard import Cut
from quire_lab.cli.quantize import quantize_app
from quire_lab.quantize import folder as out_folder
from quire_lab.quantize.args import QuantizeArgs
from quire_lab.quantize.layouts import pack
from quire_lab.quantize.rounding import round_to_nearest
from quire_lab.quantize.run import quantize
from quire_lab.quantize.scheme import Scheme

CONFIG = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "head_dim": 16}
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    return write_model(path, tensors(torch.bfloat16, {**TINY, **CONFIG}), **CONFIG, torch_dtype="bfloat16")


def run(model: Path, name: str = "out", **flags: object) -> tuple[Path, dict[str, object]]:
    out = model.parent / name
    values = {"group_size": 32, **flags}
    return out, quantize(str(model), QuantizeArgs(out=str(out), **values), WallClock())  # type: ignore[arg-type]


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    """Every quantized matrix, as the engine's loader reads it."""
    stored, sources = stored_sources(folder, describe(folder).spec)
    return {
        name: open_quantized(source, stored, Cut(name)).expand(torch.float32)
        for name, source in sources.items()
        if source.scheme is not None
    }


def stored(folder: Path) -> Mapping[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("symmetric", [True, False])
def test_engine_reads_the_numbers_that_were_rounded(model: Path, symmetric: bool) -> None:
    out, _ = run(model, symmetric=symmetric)
    source, matrices = stored(model), decoded(out)
    assert len(matrices) == 14
    for name, matrix in matrices.items():
        _, layer, _, part, _ = name.split(".")
        block = "self_attn" if part in "qkvo" else "mlp"
        weight = source[f"model.layers.{layer}.{block}.{part}_proj.weight"]
        wanted = round_to_nearest(weight.float(), Scheme(4, 32, symmetric)).expand()
        assert torch.equal(matrix, wanted), name


def test_what_is_no_matrix_is_copied(model: Path) -> None:
    out, report = run(model, keep=(f"{DOWN}=bf16",))
    source, written = stored(model), stored(out)
    copied = {name for name in source if not name.endswith("proj.weight")} | {f"{DOWN}.weight"}
    assert all(torch.equal(written[name], source[name]) for name in copied)
    assert {name.rpartition(".weight")[0] for name in written} >= {n.removesuffix(".weight") for n in source}
    assert f"{DOWN} stays as it is" in report["remarks"]  # type: ignore[operator]
    total = sum(t.nbytes for t in written.values())
    assert report["bytes"] == total


def test_words_hold_numbers_from_the_lowest_bits_on() -> None:
    numbers = np.random.default_rng(1).integers(0, 16, (3, 20))
    words = pack(torch.from_numpy(numbers), 4).numpy().view(np.uint32)
    assert words.shape == (3, 3)
    for row, column in np.ndindex(3, 20):
        assert words[row, column // 8] >> 4 * (column % 8) & 15 == numbers[row, column]


def test_search_never_loses_to_the_largest_weight_as_a_level() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    for symmetric in (True, False):
        scheme = Scheme(4, 32, symmetric)
        groups = weight.unflatten(1, (4, -1))
        low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
        step = torch.maximum(-low / 8, high / 7) if symmetric else (high - low) / 15
        zero = 0.0 if symmetric else (-8 - low / step).round()
        plain = ((groups / step).round() + zero).clamp(-8, 7).sub(zero) * step
        error = (plain.flatten(1) - weight).square().sum()
        assert (round_to_nearest(weight, scheme).expand() - weight).square().sum() < error


def test_group_that_does_not_divide_a_matrix_is_halved(model: Path) -> None:
    out, report = run(model, group_size=64)
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [group["weights"]["group_size"] for group in groups.values()] == [64, 32]
    assert DOWN in groups["group_1"]["targets"]
    assert "do not divide" in " ".join(report["remarks"])  # type: ignore[arg-type]
    assert decoded(out)["layers.1.mlp.down.weight"].shape == (64, 160)


def test_blocks_of_fp8_share_a_scale(tmp_path: Path) -> None:
    config = {
        **TINY,
        **CONFIG,
        "hidden_size": 256,
        "intermediate_size": 320,
        "num_attention_heads": 4,
        "head_dim": 64,
    }
    model = tmp_path / "model"
    model.mkdir()
    write_model(model, tensors(torch.bfloat16, config), **{**config, "torch_dtype": "bfloat16"})
    out, report = run(model, method="fp8", group_size=128)
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [group["weights"]["strategy"] for group in groups.values()] == ["block", "channel"]
    assert groups["group_0"]["input_activations"]["group_size"] == 128
    up, written = "model.layers.0.mlp.up_proj", stored(out)
    assert written[f"{up}.weight_scale"].shape == (3, 2)
    weight, made = stored(model)[f"{up}.weight"].float(), decoded(out)["layers.0.mlp.up.weight"]
    for rows, columns in (((0, 128), (0, 128)), ((256, 320), (128, 256))):
        part = weight[slice(*rows), slice(*columns)]
        scale = part.abs().max() / 448.0
        assert written[f"{up}.weight_scale"][rows[0] // 128, columns[0] // 128] == scale
        wanted = scaled_to_fp8(part.flatten())[0].view(part.shape).float() * scale
        assert torch.equal(made[slice(*rows), slice(*columns)], wanted)
    assert "2 matrices of 320 inputs" in " ".join(report["remarks"])  # type: ignore[arg-type]


def test_full_disk_leaves_nothing_under_the_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = run(model, "whole")
    write, calls = out_folder.write_safetensors, []

    def full(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, tensors)

    monkeypatch.setattr(out_folder, "write_safetensors", full)
    with pytest.raises(
        ConfigError, match=r"model-00002-of-00003\.safetensors cannot be written: .*No space left"
    ):
        run(model)
    assert not (model.parent / "out").exists()
    out, _ = run(model)
    assert len(calls) == 4, "the layer that was whole is not made again"
    for path in sorted(whole.iterdir()):
        if path.name != out_folder.REPORT:
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}


def test_other_arguments_do_not_go_on_with_a_folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, tensors: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(out_folder, "write_safetensors", full)
        with pytest.raises(ConfigError):
            run(model)
    with pytest.raises(ConfigError, match="other arguments"):
        run(model, bits=8)


def test_weight_that_is_not_finite_names_tensor_and_file(model: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights[f"{DOWN}.weight"][3, 5] = float("nan")
    save_file(weights, model / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors: {DOWN}\.weight has a number that is not"):
        run(model)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"group_size": 96},
            "group_size = 96 divides the inputs of no matrix of this model, which are 64, 160",
        ),
        ({"keep": ("nothing=bf16",)}, "matches no matrix"),
        ({"keep": ("(=bf16",)}, "no regular expression"),
        ({"keep": ("down=int8",)}, "stays as it is"),
        ({"bits": 5}, "bits = 5"),
    ],
)
def test_wrong_flags_are_named(model: Path, flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        run(model, **flags)
    assert not (model.parent / "out").exists()


def test_what_is_quantized_already_is_refused(model: Path) -> None:
    out, _ = run(model)
    with pytest.raises(ConfigError, match=r"config\.json has a quantization_config"):
        run(out, "again")
    with pytest.raises(ConfigError, match="exists"):
        run(model)
    gguf = model.parent / "x.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises((ConfigError, ModelLoadError), match=r"x\.gguf"):
        run(gguf, "third")


def test_command_prints_the_report(model: Path) -> None:
    out = model.parent / "cli"
    done = CliRunner().invoke(quantize_app, [str(model), "--group-size", "32", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "bits per weight" in done.output
    assert (out / "quire_quantize.json").is_file()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3])
def test_few_bits_are_written_and_held_as_int4(model: Path, bits: int, symmetric: bool) -> None:
    """3 bits: 10 numbers in a word, so that neither 64 inputs nor the zero points of 8 outputs fill whole words."""
    out, report = run(model, bits=bits, symmetric=symmetric)
    source = stored(model)
    for name, matrix in decoded(out).items():
        _, layer, _, part, _ = name.split(".")
        block = "self_attn" if part in "qkvo" else "mlp"
        weight = source[f"model.layers.{layer}.{block}.{part}_proj.weight"].float()
        assert torch.equal(matrix, round_to_nearest(weight, Scheme(bits, 32, symmetric)).expand()), name
    errors = [entry["weight_error"] for entry in report["matrices"]]  # type: ignore[union-attr]
    assert 0.001 < min(errors) < max(errors) < {3: 0.06, 2: 0.3}[bits]

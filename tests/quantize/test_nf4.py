"""nf4 of `quire quantize`: the bytes are those of bitsandbytes, and the engine reads them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.models.tiny import CONFIG as TINY
from tests.models.tiny import tensors, write_model

from quire.clock import WallClock
from quire.errors import ConfigError
from quire.models.checkpoint import describe, stored_sources
from quire.models.stored_weights import open_quantized
from quire.parallel.shard import Cut
from quire_lab.quantize.args import QuantizeArgs
from quire_lab.quantize.nf4 import dynamic_map, levels, nf4_parts, round_to_nf4
from quire_lab.quantize.run import quantize

GOLDENS = json.loads((Path(__file__).parents[1] / "quant" / "rare_goldens.json").read_text())
CONFIG = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "head_dim": 16}


def tensor(stored: list[Any]) -> torch.Tensor:
    dtype, shape, data = stored
    raw = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).view(shape)


def test_matrix_gets_the_bytes_that_bitsandbytes_writes() -> None:
    plain = tensor(GOLDENS["bitsandbytes nf4"]["plain"])
    golden = {name: tensor(stored) for name, stored in GOLDENS["bitsandbytes nf4 nested"]["tensors"].items()}
    parts = nf4_parts(round_to_nf4(plain))
    assert torch.equal(dynamic_map(), golden["weight.nested_quant_map"])
    assert torch.equal(levels(), golden["weight.quant_map"])
    assert torch.equal(parts["weight"], golden["weight"])
    assert torch.equal(parts["weight.absmax"], golden["weight.absmax"].flatten())
    assert torch.allclose(parts["weight.nested_absmax"], golden["weight.nested_absmax"], rtol=1e-6)
    states = [
        json.loads(bytes(part["weight.quant_state.bitsandbytes__nf4"].tolist())) for part in (parts, golden)
    ]
    assert states[0].keys() == states[1].keys()
    assert states[0]["nested_offset"] == pytest.approx(states[1]["nested_offset"], rel=1e-6)


def model_of(folder: Path) -> Path:
    model = folder / "model"
    model.mkdir()
    return write_model(model, tensors(torch.bfloat16, {**TINY, **CONFIG}), **CONFIG, torch_dtype="bfloat16")


def run(model: Path, **flags: Any) -> tuple[Path, dict[str, Any]]:
    out = model.parent / "out"
    values = {"method": "nf4", "format": "bnb", **flags}
    return out, quantize(str(model), QuantizeArgs(out=str(out), **values), WallClock())


def test_engine_reads_the_numbers_that_were_rounded(tmp_path: Path) -> None:
    model = model_of(tmp_path)
    out, report = run(model)
    assert any("down_proj stays as it is" in line for line in report["remarks"]), "64 does not divide 160"
    weight = load_file(model / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].float()
    found, sources = stored_sources(out, describe(out).spec)
    name = "layers.1.mlp.up.weight"
    matrix = open_quantized(sources[name], found, Cut(name))
    assert matrix.plain is not None
    assert torch.equal(matrix.plain(0, 160), round_to_nf4(weight).expand())
    assert (matrix.plain(0, 160) - weight).norm() / weight.norm() < 0.11


@pytest.mark.parametrize(
    "flags", [{"format": "compressed-tensors"}, {"method": "rtn"}, {"bits": 8}, {"group_size": 32}]
)
def test_flags_that_nf4_cannot_hold_are_named(tmp_path: Path, flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="nf4"):
        run(model_of(tmp_path), **flags)

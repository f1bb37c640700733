"""Every method on every kind of layer: fused and gated matrices, norms of each order, experts, hybrids."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.found.small_tokenizer import write_tokenizer
from tests.parity.families import make

from quire.clock import WallClock
from quire.errors import ConfigError
from quire_lab.quantize.args import QuantizeArgs
from quire_lab.quantize.run import quantize

FAMILIES = (
    "llama_bias_tied",
    "qwen2",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "granite",
    "mixtral",
    "qwen3_moe",
)
METHODS = ("rtn", "gptq", "awq", "smoothquant")
# By default every method runs on norms around each block and on experts, and every other family has one method.
THOROUGH = ("gemma3", "mixtral")
TEXT = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. " * 4


def run(folder: Path, family: str, method: str) -> dict[str, object]:
    model = folder / "model"
    make(family, model)
    write_tokenizer(model)
    text = folder / "text.txt"
    text.write_text(TEXT)
    calib = None if method == "rtn" else str(text)
    args = QuantizeArgs(
        method=method, bits=8, calib_samples=4, calib_tokens=32, calib=calib, text=str(text),  # type: ignore[arg-type]
        out=str(folder / "out"),
    )  # fmt: skip
    return quantize(str(model), args, WallClock())


@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(
            family, method, marks=[pytest.mark.slow] * (family not in THOROUGH and METHODS[i % 4] != method)
        )
        for i, family in enumerate(FAMILIES)
        for method in METHODS
    ],
)
def test_eight_bits_change_little_in_any_family(tmp_path: Path, family: str, method: str) -> None:
    report = run(tmp_path, family, method)
    assert report["fidelity"]["kl_mean"] < 0.4  # type: ignore[index]


def test_layers_with_states_are_rounded_without_text_alone(tmp_path: Path) -> None:
    (tmp_path / "gptq").mkdir()
    with pytest.raises(ConfigError, match="layers with states"):
        run(tmp_path / "gptq", "qwen3_5", "gptq")
    report = run(tmp_path, "qwen3_5", "rtn")
    assert report["fidelity"]["kl_mean"] < 0.4  # type: ignore[index]

"""The format that a model's weights are published or stored in: by the planner's names, and weight by weight."""

from __future__ import annotations

from pathlib import Path

from quire.cost.presets import preset_of, published_format
from quire.errors import ModelLoadError
from quire.families import quantization_of
from quire.models.checkpoint import describe, read_json
from quire.models.hub import NAMES, download_config, locate
from quire.modelspec import ModelSpec
from quire.weight_plan import Formats

# A GGUF file has several types: the most bits per weight of a file, and the planner's format of about that size.
_GGUF = ((6.0, "int4"), (10.0, "int8"))


def precision_of(model: str, spec: ModelSpec) -> str:
    """Return one of `quire.cost.split.PRECISIONS` for ``model``, as `quire.models.checkpoint.spec_of` takes it."""
    path, plain = Path(model).expanduser(), "fp32" if spec.dtype == "float32" else "bf16"
    if not path.exists() and preset_of(model) is not None:
        return published_format(model) or plain
    if model not in NAMES and not path.exists():
        return _of_config(download_config(model, None)) or plain
    path = locate(model)
    config = path if path.suffix == ".json" else path / "config.json"
    if config.is_file():
        return _of_config(config) or plain
    bits = describe(path).weight_bytes * 8 / spec.num_params
    return next((name for most, name in _GGUF if bits <= most), plain)


def stored_formats(model: str) -> Formats | None:
    """Return the formats that the files of a local model have, empty where they are plain; None without files."""
    path = Path(model).expanduser()
    if model not in NAMES and not path.exists():
        return None
    path = locate(model)
    if path.suffix == ".json" or (
        path.is_dir() and not any(path.glob("*.safetensors")) and not any(path.glob("*.gguf"))
    ):
        return None
    return describe(path).formats


def _of_config(path: Path) -> str | None:
    config = read_json(path)
    quantization = quantization_of(config, str(path))
    # Plain, or of a method that only the family's own map of weights reads.
    if quantization is None:
        stated = config.get("quantization_config") or {}
        return "mxfp4" if stated.get("quant_method") == "mxfp4" else None
    if not quantization.targets:
        raise ModelLoadError(f"{path}: quantization_config names no weights")
    scheme = quantization.targets[0][1]
    return "fp8" if scheme.encoding.startswith("fp8") else f"int{scheme.bits}"

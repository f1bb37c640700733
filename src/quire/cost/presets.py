"""Models by name, from ``data/presets.toml``, so that planning needs no network.

Each preset answers to its own name and to hub ids that differ only in what does not change a shape ("-Instruct",
"-hf", "-FP8" …).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from quire.families import spec_from_config
from quire.modelspec import ModelSpec

# Endings of hub ids that name a quantization of the same shapes → the planner's name for the format.
_FORMATS = {
    "fp8": "fp8", "nvfp4": "fp4", "fp4": "fp4", "mxfp4": "mxfp4", "awq": "int4", "gptq": "int4", "int4": "int4",
    "w4a16": "int4", "int8": "int8", "w8a8": "int8", "w8a16": "int8", "bf16": "bf16",
}  # fmt: skip
# Those, and endings that name a tuning.
_SAME_SHAPES = re.compile(
    rf"-({'|'.join(_FORMATS)}|instruct|chat|hf|it|base|dynamic|block|thinking|\d{{4}}|v\d+(\.\d+)?)$"
)


@cache
def presets() -> Mapping[str, dict[str, Any]]:
    """Return name → the keys of the model's config.json that decide shapes."""
    return {
        name: family["config"] | dict(zip(family["columns"], row, strict=True))
        for family in _table()["family"]
        for name, row in family["models"].items()
    }


@cache
def _table() -> Mapping[str, Any]:
    return tomllib.loads((files("quire.cost") / "data" / "presets.toml").read_text())


def preset_of(model: str) -> str | None:
    """Return the name of the preset that a hub id or a name means, None where there is none."""
    name, _ = _read(model)
    return name


def published_format(model: str) -> str | None:
    """Return the format of the weights under this name: its ending's, or as the preset is published; None: bf16."""
    name, stated = _read(model)
    return stated or _table()["published"].get(name)


def _read(model: str) -> tuple[str | None, str | None]:
    """Return the preset of a name, and the format that the name's endings state."""
    name, stated = model.rpartition("/")[2].lower().replace("meta-llama-", "llama-"), None
    while name not in presets():
        match = _SAME_SHAPES.search(name)
        if match is None:
            return None, None
        stated = _FORMATS.get(match[1], stated)
        name = name[: match.start()]
    return name, stated


def preset_spec(name: str) -> ModelSpec:
    """Return the `ModelSpec` of a preset."""
    return spec_from_config(presets()[name], f"preset {name}")

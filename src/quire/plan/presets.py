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

# Endings of hub ids that name a tuning or a quantization of the same shapes.
_SAME_SHAPES = re.compile(
    r"-(instruct|chat|hf|it|base|fp8|nvfp4|fp4|awq|gptq|int4|int8|bf16|thinking|\d{4}|v\d+(\.\d+)?)$"
)


@cache
def presets() -> Mapping[str, dict[str, Any]]:
    """Return name → the keys of the model's config.json that decide shapes."""
    families = tomllib.loads((files("quire.plan") / "data" / "presets.toml").read_text())["family"]
    return {
        name: family["config"] | dict(zip(family["columns"], row, strict=True))
        for family in families
        for name, row in family["models"].items()
    }


def preset_of(model: str) -> str | None:
    """Return the name of the preset that a hub id or a name means, None where there is none."""
    name = model.rpartition("/")[2].lower().replace("meta-llama-", "llama-")
    while name not in presets():
        shorter = _SAME_SHAPES.sub("", name)
        if shorter == name:
            return None
        name = shorter
    return name


def preset_spec(name: str) -> ModelSpec:
    """Return the `ModelSpec` of a preset."""
    return spec_from_config(presets()[name], f"preset {name}")

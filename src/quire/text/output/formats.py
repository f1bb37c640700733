"""The table of formats, read from ``formats.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

from quire.text.output.format import GemmaCalls, JsonCalls, NamedCalls, OutputFormat, PythonCalls, TaggedCalls

_KINDS = {
    "json": JsonCalls,
    "named": NamedCalls,
    "tagged": TaggedCalls,
    "python": PythonCalls,
    "gemma": GemmaCalls,
}


def _format(name: str, said: Mapping[str, Any]) -> OutputFormat:
    values = {key: _frozen(value) for key, value in said.items() if key != "calls"}
    for kind, given in said.get("calls", {}).items():
        values["calls"] = _KINDS[kind](**given)
    return OutputFormat(name, **values)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


FORMATS: dict[str, OutputFormat] = {
    name: _format(name, said)
    for name, said in tomllib.loads((files("quire.text.output") / "formats.toml").read_text()).items()
}


def without_tools(format: OutputFormat) -> OutputFormat:
    """Return the format for a request without tools: reasoning alone is taken apart."""
    return format if format.harmony else replace(format, opens=(), closes=(), calls=None, bare="")

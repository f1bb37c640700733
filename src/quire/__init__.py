"""Quire: an exact and fast serving engine for large language models. `LLM` is the offline API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.engine.beams import BeamSearchParams as BeamSearchParams
    from quire.engine.llm import LLM as LLM
    from quire.engine.results import RequestOutput as RequestOutput
    from quire.request import SamplingParams as SamplingParams
    from quire.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "BeamSearchParams": "quire.engine.beams",
    "LLM": "quire.engine.llm",
    "RequestOutput": "quire.engine.results",
    "SamplingParams": "quire.request",
    "StructuredOutputsParams": "quire.structured_outputs",
}


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that ``import quire`` is cheap."""
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)

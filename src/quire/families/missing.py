"""What architectures need that do not run: an operation, or more than a family's file. Loaded where one is refused."""

from __future__ import annotations

from collections.abc import Iterable

_INDEXER = "an indexer that picks tokens before attention"
_STREAMS = "several residual streams with mixing between them"

# The architecture in config.json → what is missing.
NEEDS = {
    "DeepseekV32ForCausalLM": _INDEXER,
    "GlmMoeDsaForCausalLM": _INDEXER,
    "MiniMaxM3VLForCausalLM": _INDEXER,
    "MiniMaxM3SparseForConditionalGeneration": _INDEXER,
    "Qwen4ExpForCausalLM": f"{_INDEXER}, and {_STREAMS}",
    "Qwen4ExpForConditionalGeneration": f"{_INDEXER}, and {_STREAMS}",
    "Llama4ForCausalLM": "attention in chunks, and experts scaled before their projection",
    "Llama4ForConditionalGeneration": "attention in chunks, and experts scaled before their projection",
    "Phi4MultimodalForCausalLM": "adapters that its images and sounds switch on",
    "MambaForCausalLM": "Mamba's first scan, with a state per channel",
    "JambaForCausalLM": "Mamba's first scan, with a state per channel",
}


def reason(names: Iterable[object]) -> str:
    """Return " It needs …." for the first of ``names`` that is known here, else nothing."""
    need = next((NEEDS[name] for name in names if isinstance(name, str) and name in NEEDS), None)
    return "" if need is None else f" It needs {need}."

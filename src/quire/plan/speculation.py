"""From the settings of speculation to its part of an `EngineConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from quire.args import EngineArgs
from quire.config import AUTO_DRAFTS, MAX_DRAFTS, DeviceInfo, ModelConfig, SpeculateConfig
from quire.errors import ConfigError
from quire.modelspec import ModelSpec
from quire.weight_format import WeightFormat
from quire.weight_plan import plan_weights


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft model on disk (`quire.engine.assemble`). ``quantize``: as `EngineArgs.quantize`."""

    name: str  # as the user gave it
    path: str
    spec: ModelSpec
    formats: Mapping[str, WeightFormat]
    load_format: Literal["auto", "safetensors", "gguf", "random"] = "auto"
    quantize: str | None = None


def draft_config(
    args: EngineArgs, spec: ModelSpec, draft: DraftCheckpoint | None, dtype: str
) -> ModelConfig | None:
    """Return the draft model as it is held."""
    if draft is None:
        return None
    if all(group.window is not None for group in spec.kv_layout(spec.max_position_embeddings).groups):
        raise ConfigError(
            f"draft_model = {draft.name!r} needs a layer with full attention in the model, whose blocks keep all tokens"
        )
    plan = plan_weights(draft.spec, draft.formats, draft.quantize, None)
    return ModelConfig(
        draft.path,
        draft.name,
        draft.spec,
        dtype,
        kv_dtype=dtype,
        max_model_len=draft.spec.max_position_embeddings,
        load_format=draft.load_format,
        seed=args.seed,
        formats=plan.formats,
        remarks=plan.remarks,
    )


def speculate_config(
    args: EngineArgs, device: DeviceInfo, draft: ModelConfig | None, max_model_len: int
) -> SpeculateConfig | None:
    """Return how drafts are proposed for sequences of up to ``max_model_len`` tokens."""
    if args.speculate is None and draft is None:
        if args.spec_accept != "exact":
            raise ConfigError(f"spec_accept = {args.spec_accept!r} needs drafts: set speculate as well")
        return None
    if device.kind != "cpu":
        raise ConfigError(
            f"speculate = {args.speculate or 'draft'!r} is for a CPU, and the model runs on {device.name}: leave it out"
        )
    if draft is None:
        return SpeculateConfig("ngram", accept=args.spec_accept)
    limited = replace(draft, max_model_len=min(max_model_len, draft.max_model_len))
    return SpeculateConfig("draft", limited, args.spec_accept)


def spec_tokens(args: EngineArgs) -> int:
    """Return the most drafts per sequence and step; 0: without speculation."""
    text = str(args.spec_tokens)
    if text != "auto" and not (text.isdecimal() and 1 <= int(text) <= MAX_DRAFTS):
        raise ConfigError(f"spec_tokens = {args.spec_tokens!r} must be 'auto' or a number in 1…{MAX_DRAFTS}")
    if args.speculate is None and args.draft_model is None:
        return 0
    return AUTO_DRAFTS if text == "auto" else int(text)

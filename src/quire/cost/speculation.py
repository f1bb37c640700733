"""From the settings of speculation to its part of an `EngineConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from quire.args import EngineArgs
from quire.config import (
    AUTO_DRAFTS,
    MAX_DRAFT_PATHS,
    MAX_DRAFTS,
    DeviceInfo,
    HeadsConfig,
    ModelConfig,
    SpeculateConfig,
)
from quire.errors import ConfigError
from quire.families.head_spec import HeadSpec
from quire.modelspec import ModelSpec
from quire.parallel.rotations import rotated
from quire.weight_format import WeightFormat
from quire.weight_plan import plan_weights

TREES = 8  # sequences per step with a tree of drafts


@dataclass(frozen=True, slots=True)
class DraftCheckpoint:
    """A draft model on disk (`quire.engine.assemble`). ``quantize``: as `EngineArgs.quantize`."""

    name: str  # the name that the user gave
    path: str
    spec: ModelSpec
    formats: Mapping[str, WeightFormat]
    load_format: Literal["auto", "safetensors", "gguf", "random"] = "auto"
    quantize: str | None = None


@dataclass(frozen=True, slots=True)
class HeadCheckpoint:
    """Heads on disk: in a folder of their own, or (MTP) in the model's."""

    name: str  # the name that the user gave
    path: str
    spec: HeadSpec
    load_format: Literal["auto", "safetensors", "gguf", "random"] = "auto"


Drafting = ModelConfig | HeadsConfig  # a draft model, or heads


def draft_config(
    args: EngineArgs, spec: ModelSpec, draft: DraftCheckpoint | HeadCheckpoint | None, dtype: str
) -> Drafting | None:
    """Return the draft model or the heads as they are held."""
    if draft is None:
        return None
    if isinstance(draft, HeadCheckpoint) and draft.spec.model is None:  # reads no cache
        return HeadsConfig(draft.path, draft.name, draft.spec, dtype, draft.load_format, args.seed)
    if all(group.window is not None for group in spec.kv_layout(spec.max_position_embeddings).groups):
        raise ConfigError(
            f"draft_model = {draft.name!r} needs a layer with full attention in the model, whose blocks keep all tokens"
        )
    if isinstance(draft, HeadCheckpoint):
        return HeadsConfig(draft.path, draft.name, draft.spec, dtype, draft.load_format, args.seed)
    if draft.spec.state_layers:
        raise ConfigError(
            f"draft_model = {draft.name!r} has recurrent layers, whose states no drafts are made with: choose another"
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
        formats=rotated(draft.spec, plan.formats, draft.formats),
        remarks=plan.remarks,
    )


def draft_bytes(draft: Drafting | None, block_size: int) -> tuple[int, int]:
    """Return the bytes of the weights that draft, and of what drafts keep beside each block of the model's cache."""
    if draft is None:
        return 0, 0
    if isinstance(draft, HeadsConfig):
        return draft.spec.weight_bytes(draft.dtype), draft.spec.block_bytes(block_size, draft.dtype)
    weights = draft.spec.weight_bytes(draft.dtype, draft.formats)
    return weights, draft.spec.draft_layout().block_bytes(block_size, draft.kv_dtype)


def speculate_config(
    args: EngineArgs, device: DeviceInfo, draft: Drafting | None, max_model_len: int, num_groups: int
) -> SpeculateConfig | None:
    """Return how drafts are proposed for sequences of up to ``max_model_len`` tokens, with so many cache groups."""
    if args.speculate is None and draft is None:
        for name, default in (("spec_accept", "exact"), ("spec_tree", 1)):
            if getattr(args, name) != default:
                raise ConfigError(f"{name} = {getattr(args, name)!r} needs drafts: set speculate as well")
        return None
    if device.kind != "cpu":
        raise ConfigError(
            f"speculate = {args.speculate or 'draft'!r} is for a CPU, and the model runs on {device.name}: leave it out"
        )
    num_blocks = branch_blocks(args, num_groups)
    if draft is None:
        return SpeculateConfig(
            "lookahead" if args.speculate == "lookahead" else "ngram",
            accept=args.spec_accept,
            num_branch_blocks=num_blocks,
        )
    if isinstance(draft, HeadsConfig):
        method = "eagle" if draft.spec.method == "eagle3" else draft.spec.method
        return SpeculateConfig(method, accept=args.spec_accept, heads=draft, num_branch_blocks=num_blocks)
    limited = replace(draft, max_model_len=min(max_model_len, draft.max_model_len))
    return SpeculateConfig("draft", limited, args.spec_accept, num_branch_blocks=num_blocks)


def branch_blocks(args: EngineArgs, num_groups: int) -> int:
    """Return the blocks for the branches of trees: as many as `TREES` sequences need in a step, of ``num_groups``.

    Where more sequences have trees, those that find no blocks verify the trunks alone.
    """
    per_branch = 1 + -(-spec_tokens(args) // args.block_size)
    return min(args.max_num_seqs, TREES) * (draft_paths(args) - 1) * per_branch * num_groups


def draft_paths(args: EngineArgs) -> int:
    """Return the most paths of a tree of drafts; lookahead decoding needs one for each three drafts."""
    if args.speculate != "lookahead":
        return args.spec_tree
    return max(args.spec_tree, min(MAX_DRAFT_PATHS, 1 + spec_tokens(args) // 3))


def probability_bytes(args: EngineArgs, vocab_size: int) -> int:
    """Return the bytes of the distributions that drafts were sampled from, kept until they are verified."""
    if args.spec_accept != "rejection" or args.speculate in ("ngram", "lookahead"):
        return 0
    return args.max_num_seqs * spec_tokens(args) * vocab_size * 4


def spec_tokens(args: EngineArgs) -> int:
    """Return the most drafts per sequence and step; 0: without speculation."""
    text = str(args.spec_tokens)
    if text != "auto" and not (text.isdecimal() and 1 <= int(text) <= MAX_DRAFTS):
        raise ConfigError(f"spec_tokens = {args.spec_tokens!r} must be 'auto' or a number in 1…{MAX_DRAFTS}")
    if args.speculate is None and args.draft_model is None:
        return 0
    return AUTO_DRAFTS if text == "auto" else int(text)

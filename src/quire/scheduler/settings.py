"""`PolicyChange`: the settings that may change while the engine runs, at a step boundary, and what is allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from quire.config import GATES, MAX_DRAFTS, ORDERS, GateKind, OrderKind, SchedulerConfig
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """New values at the next step boundary; None leaves a setting as it is."""

    max_num_seqs: int | None = None  # sequences that run above a lowered limit go on
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None  # 0: long prompts may have whole steps
    max_queue: int | None = None  # requests that wait above a lowered limit stay
    gate: GateKind | None = None
    order: OrderKind | None = None
    dynamic_max_wait_s: float | None = None
    max_num_drafts: int | None = None  # 0: no drafts
    adaptive_drafts: bool | None = None
    max_draft_paths: int | None = None


SETTINGS = tuple(field.name for field in fields(PolicyChange))
# Settings that the controller of ``--slo`` changes.
CONTROLLED = ("max_num_seqs", "max_num_batched_tokens")


def settings(config: SchedulerConfig) -> dict[str, Any]:
    """Return the values of ``config`` that a `PolicyChange` can change."""
    return {name: getattr(config, name) for name in SETTINGS}


def changed(config: SchedulerConfig, change: PolicyChange, start: SchedulerConfig) -> SchedulerConfig:
    """Return ``config`` with the values of ``change``. ``start``: what the engine was built with, which bounds some.

    Raises:
        ConfigError: names the setting (`param`), its value and what is allowed.
    """
    sized = "the engine's buffers were sized with that many at its start"
    for name, low, high, why in (
        ("max_num_seqs", 1, start.max_num_seqs, sized),
        ("max_num_batched_tokens", 1, start.max_num_batched_tokens, sized),
        ("long_prefill_token_threshold", 0, 2**31, ""),
        ("max_queue", 1, 2**31, ""),
    ):
        value = getattr(change, name)
        if value is not None and not low <= value <= high:
            raise _wrong(name, value, f"an integer in {low}…{high}" + (f" ({why})" if why else ""))
    if change.max_num_drafts is not None:
        if change.max_num_drafts and not start.max_num_drafts:
            raise ConfigError("spec_tokens needs an engine that runs with --speculate.", param="spec_tokens")
        if not 0 <= change.max_num_drafts <= MAX_DRAFTS:
            raise _wrong("spec_tokens", change.max_num_drafts, f"auto or an integer in 0…{MAX_DRAFTS}")
    paths = change.max_draft_paths
    if paths is not None and not 1 <= paths <= start.max_draft_paths:
        why = "blocks for their branches were set aside at the start"
        raise _wrong("spec_tree", paths, f"an integer in 1…{start.max_draft_paths} ({why})")
    for name, known in (("gate", GATES), ("order", ORDERS)):
        value = getattr(change, name)
        if value is not None and value not in known:
            raise _wrong(name, value, f"one of {', '.join(known)}")
    wait_s = change.dynamic_max_wait_s
    if wait_s is not None and not (wait_s >= 0 and math.isfinite(wait_s)):
        raise _wrong("dynamic_max_wait_s", wait_s, "a number ≥ 0")
    return replace(config, **{name: v for name in SETTINGS if (v := getattr(change, name)) is not None})


def _wrong(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"{name} = {value!r} is not allowed: it must be {allowed}.", param=name)


def long_threshold(config: SchedulerConfig) -> int:
    """Return how many tokens a prompt may have left that is not long; 0: none is long."""
    return config.long_prefill_token_threshold if config.enable_chunked_prefill else 0

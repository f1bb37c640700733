"""`PolicyChange`: the settings that may change while the engine runs, and how they take effect."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from quire.config import GATES, MAX_DRAFTS, ORDERS, GateKind, OrderKind, SchedulerConfig
from quire.errors import ConfigError
from quire.scheduler.queue import Gate, sort_key
from quire.scheduler.state import SchedulerState
from quire.step import MIN_RETRY_TOKENS


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """New values at the next step boundary; None leaves a setting as it is."""

    max_num_seqs: int | None = None  # sequences that run above a lowered limit go on
    max_num_batched_tokens: int | None = None
    max_queue: int | None = None  # requests that wait above a lowered limit stay
    gate: GateKind | None = None
    order: OrderKind | None = None
    dynamic_max_wait_s: float | None = None
    max_num_drafts: int | None = None  # 0: no drafts
    adaptive_drafts: bool | None = None


SETTINGS = tuple(field.name for field in fields(PolicyChange))


def settings(config: SchedulerConfig) -> dict[str, Any]:
    """Return the values of ``config`` that a `PolicyChange` can change."""
    return {name: getattr(config, name) for name in SETTINGS}


def change_policy(state: SchedulerState, change: PolicyChange) -> None:
    """Apply ``change``; ConfigError names what is not allowed, and nothing has changed then."""
    before, state.config = state.config, changed(state.config, change, state.start_config)
    if state.draft_control is not None:
        state.draft_control.configure(state.config)
    if state.config.gate != before.gate:
        state.gate = Gate()  # the batch that was being formed is dropped
    if state.config.order != before.order:
        for seq in state.sequences.values():
            seq.key = sort_key(state.config.order, seq)
        state.waiting.reorder()


def shrink_budget(state: SchedulerState, max_tokens: int) -> None:
    """Lower the token budget to ``max_tokens``, but not below `MIN_RETRY_TOKENS`, until a policy change raises it."""
    budget = min(state.config.max_num_batched_tokens, max(max_tokens, MIN_RETRY_TOKENS))
    state.config = replace(state.config, max_num_batched_tokens=budget)


def changed(config: SchedulerConfig, change: PolicyChange, start: SchedulerConfig) -> SchedulerConfig:
    """Return ``config`` with the values of ``change``. ``start``: what the engine was built with, which bounds some.

    Raises:
        ConfigError: names the setting (`param`), its value and what is allowed.
    """
    sized = "the engine's buffers were sized with that many at its start"
    for name, high, why in (
        ("max_num_seqs", start.max_num_seqs, sized),
        ("max_num_batched_tokens", start.max_num_batched_tokens, sized),
        ("max_queue", 2**31, ""),
    ):
        value, low = getattr(change, name), 1
        if value is not None and not low <= value <= high:
            raise _wrong(name, value, f"an integer in {low}…{high}" + (f" ({why})" if why else ""))
    if change.max_num_drafts is not None:
        if change.max_num_drafts and not start.max_num_drafts:
            raise ConfigError("spec_tokens needs an engine that runs with --speculate.", param="spec_tokens")
        if not 0 <= change.max_num_drafts <= MAX_DRAFTS:
            raise _wrong("spec_tokens", change.max_num_drafts, f"auto or an integer in 0…{MAX_DRAFTS}")
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

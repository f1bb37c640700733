"""`PolicyChange`: the settings that may change while the engine runs, and how they take effect."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.config import ORDERS, OrderKind, SchedulerConfig
from quire.errors import ConfigError
from quire.scheduler.order import sort_key
from quire.scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """New values at the next step boundary; None leaves a setting as it is."""

    max_num_seqs: int | None = None  # sequences that run above a lowered limit go on
    max_num_batched_tokens: int | None = None
    max_queue: int | None = None
    order: OrderKind | None = None
    dynamic_max_wait_s: float | None = None


def change_policy(state: SchedulerState, change: PolicyChange) -> None:
    """Apply ``change``; ConfigError names what is not allowed, and nothing has changed then."""
    state.config = changed(state.config, change)
    if change.order is not None:
        for seq in state.sequences.values():
            seq.key = sort_key(change.order, seq)
        state.waiting.reorder()


def changed(config: SchedulerConfig, change: PolicyChange) -> SchedulerConfig:
    """Return ``config`` with the values of ``change``."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_queue"):
        value = getattr(change, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value} is not allowed: it must be at least 1.")
    if change.order is not None and change.order not in ORDERS:
        raise ConfigError(f"order = {change.order!r} is not known: choose one of {', '.join(ORDERS)}.")
    if change.dynamic_max_wait_s is not None and change.dynamic_max_wait_s < 0:
        raise ConfigError(
            f"dynamic_max_wait_s = {change.dynamic_max_wait_s} is not allowed: at least 0 seconds."
        )
    names = ("max_num_seqs", "max_num_batched_tokens", "max_queue", "order", "dynamic_max_wait_s")
    return replace(config, **{n: v for n in names if (v := getattr(change, n)) is not None})

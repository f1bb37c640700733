"""`SloController`: holds TPOT by what a step may cost. A pure function of the steps that were computed.

Every sequence that decodes waits for the whole step, so its TPOT is the mean of the steps it lives through. After each
step the controller asks the predictor,

    running limit   how many sequences can decode in X at all
    chunk budget    how many prompt tokens fit in X beside the decodes of the next step

and sends both as a `PolicyChange`. Without decodes no sequence waits: the whole budget is free. Each step is held, not
the mean of steps: letting long steps use what short ones left gained no goodput on any of three traces, and a request
with a short output paid for it (benchmarks/slo_controller.py, 2026-11-21).
Tokens do not depend on any of this; only when they come does.

`PolicyChange` has the settings that may change while the engine runs; `change_policy` gives them effect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from quire.config import GATES, MAX_DRAFTS, ORDERS, GateKind, OrderKind, SchedulerConfig
from quire.errors import ConfigError
from quire.scheduler.predictor import Predictor
from quire.scheduler.queue import Gate, sort_key
from quire.scheduler.state import SchedulerState
from quire.step import MIN_RETRY_TOKENS


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


MARGIN = 0.92  # of the limit: what p95 is above the mean, and the model's error
REFRESH = 4  # steps after which the same number of decodes is looked at again: it takes 0.1 ms
MIN_CHUNK = 16  # tokens: a prompt always goes on
WORTHWHILE = 1 / 16  # a smaller change of a setting is not sent
# Settings, and where their values are.
CONTROLLED = {"max_num_seqs": "_limit", "max_num_batched_tokens": "_budget"}


class SloController:
    """Call `applied` after every step that did not fail; send on what it returns."""

    def __init__(self, predictor: Predictor, config: SchedulerConfig, tpot_s: float) -> None:
        assert tpot_s > 0
        assert predictor.step_time is not None
        self._predictor = predictor
        self._aim_s = tpot_s * MARGIN
        self._most = config  # what a person set: never exceeded
        self._budget = config.max_num_batched_tokens
        self._limit = config.max_num_seqs
        self.pinned: set[str] = set()  # settings that a person changed: theirs until released
        self._asked, self._age = -1, 0  # the decodes that the settings are for, and for how many steps

    def applied(self) -> PolicyChange | None:
        """Return new settings after a step, where they differ enough to matter."""
        num_seqs, num_decodes = self._predictor.num_seqs, self._predictor.num_decodes
        if not num_seqs:
            return None
        # Sequences of this step decode in the next one, except those that are still in their prompts.
        coming = num_decodes + (num_seqs > num_decodes)
        self._age += 1
        if coming == self._asked and self._age < REFRESH:
            return None
        self._asked, self._age = coming, 0
        return self._change(coming)

    def pin(self, change: PolicyChange, release: tuple[str, ...] = ()) -> None:
        """A person changed settings: those of this controller that are named are theirs, until they release them."""
        for name, mine in CONTROLLED.items():
            value = getattr(change, name)
            if value is not None:
                self.pinned.add(name)
                setattr(self, mine, value)  # what is in force, which the next wish is compared with
            elif name in release:
                self.pinned.discard(name)
        self._asked = -1

    def unpinned(self, change: PolicyChange) -> PolicyChange:
        """Return ``change`` without what is pinned."""
        return replace(change, **dict.fromkeys(self.pinned)) if self.pinned else change

    def _change(self, num_decodes: int) -> PolicyChange | None:
        limit = self._running_limit()
        budget = self._most.max_num_batched_tokens
        if num_decodes:
            budget = min(budget, num_decodes + self.chunk(num_decodes))
        new_limit = limit if "max_num_seqs" not in self.pinned and _differs(limit, self._limit) else None
        is_free = "max_num_batched_tokens" not in self.pinned
        new_budget = budget if is_free and _differs(budget, self._budget) else None
        if new_limit is None and new_budget is None:
            return None
        self._limit, self._budget = new_limit or self._limit, new_budget or self._budget
        return PolicyChange(max_num_seqs=new_limit, max_num_batched_tokens=new_budget)

    def _running_limit(self) -> int:
        """The most sequences that decode within the aim; at least one runs."""
        return _most(lambda num: self._predictor.decode_s(num) <= self._aim_s, 1, self._most.max_num_seqs)

    def chunk(self, num_decodes: int) -> int:
        """The most prompt tokens beside ``num_decodes`` decodes within the aim."""
        most = self._most.max_num_batched_tokens
        return _most(
            lambda num: self._predictor.mixed_s(num_decodes, num) <= self._aim_s,
            MIN_CHUNK,
            most,
            MIN_CHUNK // 2,
        )


def _most(holds: Callable[[int], bool], low: int, high: int, error: int = 1) -> int:
    """Return the largest number in low…high that ``holds``, or one less than ``error`` below it; ``low`` holds."""
    if holds(high):
        return high
    while high - low > error:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _differs(new: int, old: int) -> bool:
    return abs(new - old) > old * WORTHWHILE or (new != old and new < 32)

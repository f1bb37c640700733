"""`Policy`: what may change a plain decision of the scheduler, and `Policies`: those that are on.

Without policies the scheduler admits in order of arrival while there are seats, blocks and tokens. A policy overrides
the methods that it needs; the others are not called. `quire.scheduler.policies` lists them all and says when each is
on. One that is off is not imported. docs/howto-request.md writes one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from quire.config import SchedulerConfig
from quire.request import Request, TokenEvent
from quire.scheduler.sequence import RequestState, Sequence, SortKey, StepRecord
from quire.scheduler.waiting import StepRoom
from quire.step import StepResult

# Waiting sequences looked at per step beyond the seats, where some may be passed over, and those whose prefixes are
# looked up: all of a long queue would take longer than a step.
LOOKAHEAD = 128


class Refusal(NamedTuple):
    """Why a request is not taken, and after how many seconds to try again; 0: it is never taken."""

    kind: str  # `TokenEvent.error_kind`
    text: str
    retry_after_s: float = 0.0


class Policy(Protocol):
    """The base class of policies, in which each method does nothing."""

    def rank(self, seq: Sequence) -> SortKey:
        """Return the rank of ``seq``; smaller comes first. At most one policy that is on has it."""
        raise NotImplementedError

    def admit(self, request: Request, now: float) -> Refusal | None:
        """Say why a request that just came is not taken, or None."""
        return None

    def before_plan(self, now: float) -> None:
        """A step is about to be planned."""

    def budget(self, room: StepRoom) -> None:
        """Change what the step that is planned may have."""

    def on_plan(self, record: StepRecord) -> None:
        """A step was planned."""

    def on_add(self, group: RequestState) -> None:
        """A request was taken; its sequences are about to wait."""

    def on_start(self, seq: Sequence, forked: bool) -> None:
        """``seq`` runs from now on; nothing below ``seq.num_planned`` is computed. ``forked``: it did not wait."""

    def on_stop(self, seq: Sequence) -> None:
        """``seq`` has stopped running."""

    def on_return(self, seq: Sequence) -> None:
        """``seq`` was let in before, and has to enter again: it was preempted, or found no room at its fork."""

    def on_step(self, record: StepRecord, result: StepResult, took_s: float) -> None:
        """A step that did not fail was applied."""

    def on_end(self, seq: Sequence) -> None:
        """``seq`` has ended."""

    def expire(self, now: float) -> list[TokenEvent]:
        """End what has to end by ``now``. Called before each plan."""
        return []

    def wakes_at(self) -> float | None:
        """Return when time alone changes what can be planned, or None."""
        return None

    def configure(self, config: SchedulerConfig) -> None:
        """The settings have changed."""


class Policies:
    """The policies of one scheduler that are on, by hook: a hook that none of them overrides costs nothing."""

    __slots__ = (
        "_by_config", "_by_need", "_load", "_made", "_names", "_stay", "adapters", "admit", "beams", "before_plan",
        "budget", "configure", "drafts", "expire", "on_add", "on_end", "on_plan", "on_return", "on_start", "on_step",
        "on_stop", "rank", "states", "transfers", "wakes_at", "whole_spans",
    )  # fmt: skip

    def __init__(self, names: tuple[str, ...], stay: frozenset[str], load: Callable[[str], Policy]) -> None:
        """``names``: all, in the order in which they are asked; ``stay``: never turned off; ``load`` makes one."""
        self._names, self._stay, self._load = names, stay, load
        self._made: dict[str, Policy] = {}
        self._by_config: set[str] = set()
        self._by_need: set[str] = set()
        self._gather()

    @property
    def names(self) -> tuple[str, ...]:
        """Those that are on, in the order in which they are asked."""
        return tuple(self._made)

    def follow(self, names: set[str]) -> None:
        """Turn on those that the settings want, and off those that only earlier settings wanted."""
        self._by_need |= self._by_config & self._stay
        self._by_config = names
        self._gather()

    def turn_on(self, name: str) -> Any:
        """Turn a policy on for good, and return it."""
        if name not in self._by_need:
            self._by_need.add(name)
            self._gather()
        return self._made[name]

    def add(self, name: str, policy: Policy) -> None:
        """Turn on a policy that is not in the list; it is asked last."""
        assert name not in self._names, f"there is a policy {name!r}"
        self._names += (name,)
        self._made[name] = policy
        self._by_need.add(name)
        self._gather()

    def _gather(self) -> None:
        """Take the hooks of those that are on. One that goes off is forgotten."""
        wanted = self._by_config | self._by_need
        on = [name for name in self._names if name in wanted]
        self._made = {name: self._made.get(name) or self._load(name) for name in on}
        policies = list(self._made.values())
        self.rank: Callable[[Sequence], SortKey] | None = next(iter(_hooks(policies, "rank")), None)
        self.admit: tuple[Callable[[Request, float], Refusal | None], ...] = _hooks(policies, "admit")
        self.before_plan: tuple[Callable[[float], None], ...] = _hooks(policies, "before_plan")
        self.budget: tuple[Callable[[StepRoom], None], ...] = _hooks(policies, "budget")
        self.on_plan: tuple[Callable[[StepRecord], None], ...] = _hooks(policies, "on_plan")
        self.on_add: tuple[Callable[[RequestState], None], ...] = _hooks(policies, "on_add")
        self.on_start: tuple[Callable[[Sequence, bool], None], ...] = _hooks(policies, "on_start")
        self.on_stop: tuple[Callable[[Sequence], None], ...] = _hooks(policies, "on_stop")
        self.on_return: tuple[Callable[[Sequence], None], ...] = _hooks(policies, "on_return")
        self.on_step: tuple[Callable[[StepRecord, StepResult, float], None], ...] = _hooks(
            policies, "on_step"
        )
        self.on_end: tuple[Callable[[Sequence], None], ...] = _hooks(policies, "on_end")
        self.expire: tuple[Callable[[float], list[TokenEvent]], ...] = _hooks(policies, "expire")
        self.wakes_at: tuple[Callable[[], float | None], ...] = _hooks(policies, "wakes_at")
        self.configure: tuple[Callable[[SchedulerConfig], None], ...] = _hooks(policies, "configure")
        # Those that the plain path calls by name where they are on.
        self.adapters: Any = self._made.get("adapters")
        self.beams: Any = self._made.get("beams")
        self.drafts: Any = self._made.get("drafts")
        self.states: Any = self._made.get("states")
        self.transfers: Any = self._made.get("transfers")
        self.whole_spans: Any = self._made.get("whole_spans")


def _hooks(policies: list[Policy], name: str) -> tuple[Any, ...]:
    """Return the methods ``name`` of the policies that override it."""
    return tuple(
        getattr(policy, name)
        for policy in policies
        if getattr(type(policy), name) is not getattr(Policy, name)
    )

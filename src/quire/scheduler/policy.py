"""`Policy`: what may change a plain decision of the scheduler, and `Policies`: those that are on.

Without policies the scheduler admits in order of arrival while there are seats, blocks and tokens. A policy overrides
the methods that it needs; the others are not called. `quire.scheduler.policies` lists them all and says when each is
on. One that is off is not imported. docs/howto-policy.md writes one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from quire.config import SchedulerConfig
from quire.request import Request, TokenEvent
from quire.scheduler.sequence import RequestState, Sequence, SortKey
from quire.scheduler.waiting import WaitingQueue
from quire.step import AdapterMove, KvTransfer, SeqPlan, StepResult

# Waiting sequences looked at per step beyond the seats, where some may be passed over, and those whose prefixes are
# looked up: all of a long queue would take longer than a step.
LOOKAHEAD = 128


class Refusal(NamedTuple):
    """Why a request is not taken, and after how many seconds to try again; 0: it is never taken."""

    kind: str  # `TokenEvent.error_kind`
    text: str
    retry_after_s: float = 0.0


@dataclass(slots=True)
class StepRecord:
    """A step in flight, as the scheduler remembers it. ``sequences`` are parallel to ``seqs``, the plan's."""

    step: int
    sequences: list[Sequence]
    seqs: tuple[SeqPlan, ...]
    gone: tuple[int, ...]
    planned_s: float = 0.0
    num_prompt_tokens: int = 0
    num_drafts: int = 0  # verified
    adapter_moves: tuple[AdapterMove, ...] = ()
    transfers: tuple[KvTransfer, ...] = ()  # begun by this step
    num_tokens: int = 0  # decodes and drafts as well


class PromptShare(Protocol):
    """Divides the tokens of one step among prompts."""

    def room(self, seq: Sequence, num_left: int) -> int:
        """Return the tokens that ``seq``, which runs and has ``num_left`` to compute, may have."""
        ...

    def room_of_waiting(self, seq: Sequence) -> int:
        """Return the same of a sequence that waits; 0: it is passed over."""
        ...

    def spend(self, num_tokens: int, seq: Sequence, num_left: int) -> None:
        """``seq`` was given some."""
        ...

    def running_planned(self) -> None:
        """The prompts that run have had theirs."""
        ...

    def held_blocks(self, seq: Sequence) -> int:
        """Return the blocks that ``seq``, which runs, needs yet and that no other may take."""
        ...


@dataclass(slots=True)
class StepRoom:
    """What policies may change of a step once its decodes are chosen and before its prompts are."""

    now: float
    left: int  # tokens
    decodes: list[Sequence]
    prefills: list[Sequence]  # run and have more than one token to compute; by rank
    waiting: WaitingQueue
    running: list[Sequence]
    max_num_seqs: int
    # Whether a sequence failed to get a block, so that none of lower rank may take one.
    starved: bool
    drafts: dict[Sequence, int] = field(default_factory=dict)  # verified, per decode
    # Returns how many sequences may enter; None: all that wait.
    seats: Callable[[], int] | None = None
    # Returns the first ``count`` that may enter; None: those that wait, by rank.
    order: Callable[[int], list[Sequence]] | None = None
    # Sequences beyond the seats that are looked at, since some may be passed over.
    num_extra: int = 0
    # Each tells whether a sequence may enter; it is passed over otherwise. The order of asking is that of entry.
    filters: list[Callable[[Sequence], bool]] = field(default_factory=list)
    share: PromptShare | None = None  # None: each prompt may have what is left

    def free_seats(self) -> int:
        """Return how many sequences may enter by their number."""
        seats = len(self.waiting) if self.seats is None else self.seats()
        return min(seats, self.max_num_seqs - len(self.running))

    def in_order(self, seats: int) -> list[Sequence]:
        """Return the waiting sequences that are looked at for ``seats``, in the order in which they may enter."""
        count = seats + self.num_extra
        return self.waiting.first(count) if self.order is None else self.order(count)

    def entering(self) -> list[Sequence]:
        """Return the sequences that would enter next if tokens and blocks allowed."""
        seats = self.free_seats() if self.waiting else 0
        return self.in_order(seats) if seats > 0 else []


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
        "on_stop", "rank", "transfers", "wakes_at",
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
        self.transfers: Any = self._made.get("transfers")


def _hooks(policies: list[Policy], name: str) -> tuple[Any, ...]:
    """Return the methods ``name`` of the policies that override it."""
    return tuple(
        getattr(each, name) for each in policies if getattr(type(each), name) is not getattr(Policy, name)
    )

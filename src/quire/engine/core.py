"""`EngineCore`: the one loop. Drain the inbox; keep `max_in_flight` plans out; apply one result.

The same loop serves with a real executor and a wall clock, and simulates with a cost model and a virtual one. An
exception of the executor is a failed step, never a lost request: its sequences end with error events, what it
published is withdrawn, the others go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire.clock import Clock
from quire.engine.messages import AbortRequest, ControlPolicy, Drain, FinishSample, Message, Reply, Shutdown
from quire.errors import ConfigError, EngineDeadError
from quire.executor.base import Executor, RankLoaded
from quire.metrics.engine_stats import EngineStats
from quire.request import Request, TokenEvent
from quire.scheduler.admission import refused
from quire.scheduler.scheduler import Scheduler, Sleep, Step, Wait
from quire.scheduler.settings import PolicyChange
from quire.step import StepPlan, StepResult

if TYPE_CHECKING:
    from quire.executor.profile_control import Profiles
    from quire.executor.recorder import Recorder
    from quire.scheduler.live import LiveLog
    from quire.scheduler.policies.slo import SloController


class EngineCore:
    """Scheduler + executor + clock. `put` may be called from any thread, the rest from the one that steps."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Clock, controller: SloController | None = None
    ) -> None:
        """``controller`` sees every step; the changes that it wants go through the inbox like those of a person."""
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.controller = controller
        # Called with the steps out before the loop may block; see `engine.heartbeat`.
        self.on_tick: Callable[[Sequence[StepPlan | StepResult]], None] | None = None
        self.recorder: Recorder | None = None
        self.ranks: tuple[RankLoaded, ...] = ()  # where the executor has processes of its own
        self.completed: Callable[[EngineStats], EngineStats] | None = None
        # Saves what the recorder has, with a reason and a text; may raise OSError. None: there is no recorder.
        self.save: Callable[[str, str], dict[str, Any]] | None = None
        self.profiler: Profiles | None = None
        self.rejected: list[str] = []  # texts of policy changes that were not allowed, for the log
        self.replies: list[Reply] = []  # to calls; the caller of `step` takes them out
        self._inbox: deque[Message | ControlPolicy] = deque()  # append and popleft are atomic
        self.out: deque[StepResult | StepPlan] = deque()  # oldest first; a result: the plan was not accepted
        self.draining = False  # it takes no more requests
        self._rest: Sleep | Wait | None = Wait()
        self.live: LiveLog | None = None  # while a page watches
        self._calls: Any = None  # once there was one

    def put(self, message: Message) -> None:
        """Hand in a message; it takes effect at the start of the next `step`."""
        self._inbox.append(message)

    def step(self) -> list[TokenEvent]:
        """Take in messages, submit what can be computed, apply one result. Blocks while a result is computed."""
        events = self.begin()
        return events + self.finish() if self.out else events

    def begin(self) -> list[TokenEvent]:
        """The first half of `step`, which never blocks: take in messages, submit what can be computed."""
        events = self._drain_inbox()
        events += self.scheduler.expire(self.clock.now())
        self._submit()
        return events

    def finish(self) -> list[TokenEvent]:
        """The second half: wait for the oldest step out and apply its result. The simulator comes in between."""
        if self.on_tick is not None:
            self.on_tick(self.out)
        live = self.live
        if live is not None:
            live.begin(self.scheduler, self.out[0], self.clock.now())
        result = self._collect(self.out[0])
        plan = self.out.popleft()
        now = self.clock.now()
        events = self.scheduler.apply(result, now)
        if live is not None and isinstance(plan, StepPlan):
            live.note(plan, result, now, self.clock.now())
            self.live = None if live.is_idle(now) else live
        self._rest = None  # the result may have made room for a step
        if self.controller is not None and result.error is None:
            change = self.controller.applied()
            if change is not None:
                self._inbox.append(ControlPolicy(change))
        return events

    def fail_in_flight(self, error: str) -> list[TokenEvent]:
        """The executor lost all that it was given: fail the steps and the transfers that are out."""
        self.out.clear()
        self._rest = None
        return self.scheduler.fail_in_flight(error, self.clock.now())

    @property
    def has_work(self) -> bool:
        """Whether a message, a step, a transfer or a sequence has not come to its end."""
        return bool(self._inbox or self.out) or self.scheduler.has_work

    @property
    def rest(self) -> Sleep | Wait | None:
        """What the loop may do before the next `step`; None: call it at once. A message always ends the rest."""
        return None if self._inbox or self.out else self._rest

    @property
    def num_out(self) -> int:
        """Steps submitted and not applied."""
        return len(self.out)

    def stats(self) -> EngineStats:
        """Return gauges and counters as of now."""
        stats = self.scheduler.stats()
        return stats if self.completed is None else self.completed(stats)

    def _drain_inbox(self) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        while self._inbox:
            events += self._take_in(self._inbox.popleft())
        return events

    def _take_in(self, message: Message | ControlPolicy) -> list[TokenEvent]:
        match message:
            case Request() as request:
                if self.draining:
                    text = "The server is shutting down and takes no more requests. Try another replica."
                    indexes = [
                        i for i in range(request.sampling.num_samples) if i not in request.finished_samples
                    ]
                    return [refused(request, i, "capacity", text, self.clock.now()) for i in indexes]
                return self.scheduler.add(request, self.clock.now())
            case AbortRequest(request_id):
                return self.scheduler.abort(request_id)
            case FinishSample(request_id, sample_index, num_output_tokens):
                return self.scheduler.finish(request_id, sample_index, num_output_tokens)
            case Drain():
                self.draining = True
            case Shutdown():
                self.draining = True
                return self.scheduler.abort_all()
            case PolicyChange():
                try:
                    self.scheduler.change_policy(message)
                    if self.controller is not None:
                        self.controller.pin(message)
                except ConfigError as error:
                    self.rejected.append(str(error))
            case ControlPolicy(change):
                assert self.controller is not None
                self.scheduler.change_policy(self.controller.unpinned(change))
            case _:
                self._carry_out(message)
        return []

    def _carry_out(self, message: Message | ControlPolicy) -> None:
        """Answer a call, or begin a transfer: what no plain request needs is loaded with the first of these."""
        if self._calls is None:
            self._calls = import_module("quire.engine.calls").CoreCalls(self)
        self._calls.carry_out(message)

    def _submit(self) -> None:
        """Submit while fewer than ``max_in_flight`` are out and there is work.

        A plan that was not accepted fails in its turn; nothing is planned on top of it before that.
        """
        while len(self.out) < self.executor.max_in_flight:
            if self.out and isinstance(self.out[-1], StepResult):
                return
            action = self.scheduler.next_action(self.clock.now())
            if not isinstance(action, Step):
                self._rest = action
                return
            plan = action.plan
            self.out.append(plan)
            # With one step in flight, it is computed when it is collected.
            if self.on_tick is not None and self.executor.max_in_flight > 1:
                self.on_tick(self.out)
            try:
                self.executor.submit(plan)
            except EngineDeadError:
                raise
            except Exception as error:  # whatever it is, the step failed and the engine goes on
                self.out[-1] = StepResult(plan.step, error=_text(error))
                return

    def _collect(self, out: StepPlan | StepResult) -> StepResult:
        if isinstance(out, StepResult):
            return out
        try:
            return self.executor.collect()
        except EngineDeadError:  # a rank died: nothing can compute a step
            raise
        except Exception as error:
            return StepResult(out.step, error=_text(error))


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

"""`InFlight`: what a supervisor remembers of requests, so that they can go on in another engine.

A request is in the book from `AddRequest` until every sample has its terminal event (or the client's side ended it).
What the engine has delivered is all that counts: tokens that were lost on the way are computed again, and are equal.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quire.engine.inbox import AbortRequest, AddRequest, FinishSample, Message, Reply
from quire.request import FinishReason, Request, TokenEvent
from quire.scheduler.policy import PolicyChange
from quire.scheduler.slo import CONTROLLED


@dataclass(slots=True)
class _Entry:
    request: Request
    outputs: list[list[int]]  # per sample, as delivered
    finished: set[int] = field(default_factory=set)
    num_deaths: int = 0  # engines that died while this was in flight


class InFlight:
    """The book of requests in flight, in order of arrival. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._policy: dict[str, PolicyChange] = {}  # setting → the message that last changed it alone

    def __len__(self) -> int:
        return len(self._entries)

    def sent(self, message: Message) -> None:
        """Note a message on its way to the core."""
        if isinstance(message, AddRequest):
            request = message.request
            before = request.output_token_ids or ((),) * request.sampling.num_samples
            self._entries[request.request_id] = _Entry(
                request, [list(ids) for ids in before], set(request.finished_samples)
            )
        elif isinstance(message, AbortRequest):
            self._entries.pop(message.request_id, None)
        elif isinstance(message, FinishSample):
            self._finish(message.request_id, message.sample_index)
        elif isinstance(message, PolicyChange):
            self._note_policy({k: v for k, v in asdict(message).items() if v is not None})

    def received(self, events: list[TokenEvent]) -> None:
        """Note events that were delivered."""
        for event in events:
            entry = self._entries.get(event.request_id)
            if entry is None or event.sample_index in entry.finished:
                continue
            entry.outputs[event.sample_index].extend(event.token_ids)
            if event.finish_reason is not None:
                self._finish(event.request_id, event.sample_index)

    def answered(self, replies: list[Reply]) -> None:
        """Note what calls changed: only the engine knows whether it took the change."""
        for reply in replies:
            self._note_policy({k: v for k, v in reply.values.items() if reply.before.get(k, v) != v})
            if reply.pinned is not None:  # an SLO's controller has what a person does not
                self._note_policy({name: reply.values[name] for name in reply.pinned})
                for name in CONTROLLED.keys() - set(reply.pinned):
                    self._policy.pop(name, None)

    def _note_policy(self, changes: dict[str, Any]) -> None:
        self._policy.update({name: PolicyChange(**{name: value}) for name, value in changes.items()})

    def count_death(self, max_deaths: int) -> list[TokenEvent]:
        """Count a death against every request; end those that were there each of ``max_deaths`` times.

        Such a request may be what kills the engine; without it the others live.
        """
        events = []
        for request_id, entry in list(self._entries.items()):
            entry.num_deaths += 1
            if entry.num_deaths >= max_deaths:
                text = f"The engine died {entry.num_deaths} times while this request was running: it is not tried again"
                events += self._fail(request_id, text, "internal")
        return events

    def fail_all(self, error: str) -> list[TokenEvent]:
        """End everything: return the terminal event of every open sample."""
        return [
            event for request_id in list(self._entries) for event in self._fail(request_id, error, "dead")
        ]

    def readmissions(self) -> list[Message]:
        """Return the messages that bring a fresh engine to where the dead one was."""
        requests = [
            AddRequest(
                replace(
                    entry.request,
                    output_token_ids=tuple(tuple(ids) for ids in entry.outputs),
                    finished_samples=tuple(sorted(entry.finished)),
                )
            )
            for entry in self._entries.values()
        ]
        return [*self._policy.values(), *requests]

    def _finish(self, request_id: str, sample_index: int) -> None:
        entry = self._entries.get(request_id)
        if entry is not None:
            entry.finished.add(sample_index)
            if len(entry.finished) == entry.request.sampling.num_samples:
                del self._entries[request_id]

    def _fail(self, request_id: str, error: str, error_kind: str) -> list[TokenEvent]:
        entry = self._entries.pop(request_id)
        return [
            TokenEvent(
                request_id, index, finish_reason=FinishReason.ERROR, error=error, error_kind=error_kind
            )
            for index in range(entry.request.sampling.num_samples)
            if index not in entry.finished
        ]

"""`InFlight`: the requests that an engine has, kept so that they can continue in another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quire.engine.messages import AbortRequest, FinishSample, Message, Reply
from quire.errors import RequestError
from quire.request import FinishReason, Request, TokenEvent
from quire.scheduler.settings import CONTROLLED, PolicyChange


@dataclass(slots=True)
class _Tracked:
    request: Request
    outputs: list[list[int]]  # per sample, as delivered
    finished: set[int] = field(default_factory=set)
    num_deaths: int = 0  # engines that died while this was in flight


class InFlight:
    """The requests in flight, in order of arrival, so that they can continue in another engine. Not thread-safe.

    A request is in the record from its `Request` until every sample has its terminal event, or until the client's side
    ended it. Only delivered tokens count: tokens that were lost with an engine are computed again and come out
    equal.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Tracked] = {}
        # Setting → a message that sets only this setting, to its latest value.
        self._policy: dict[str, PolicyChange] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def sent(self, message: Message) -> None:
        """Record a message to the core."""
        if isinstance(message, Request):
            before = message.output_token_ids or ((),) * message.sampling.num_samples
            self._requests[message.request_id] = _Tracked(
                message, [list(ids) for ids in before], set(message.finished_samples)
            )
        elif isinstance(message, AbortRequest):
            self._requests.pop(message.request_id, None)
        elif isinstance(message, FinishSample):
            self._finish(message.request_id, message.sample_index)
        elif isinstance(message, PolicyChange):
            self._record_policy({k: v for k, v in asdict(message).items() if v is not None})

    def received(self, events: list[TokenEvent]) -> None:
        """Record events that were delivered."""
        for event in events:
            tracked = self._requests.get(event.request_id)
            if tracked is None or event.sample_index in tracked.finished:
                continue
            tracked.outputs[event.sample_index].extend(event.token_ids)
            if event.finish_reason is not None:
                self._finish(event.request_id, event.sample_index)

    def answered(self, replies: list[Reply]) -> None:
        """Record what calls changed: only the engine knows whether it accepted a change."""
        for reply in replies:
            self._record_policy({k: v for k, v in reply.values.items() if reply.before.get(k, v) != v})
            if reply.pinned is not None:  # the other settings are the SLO controller's
                self._record_policy({name: reply.values[name] for name in reply.pinned})
                for name in set(CONTROLLED) - set(reply.pinned):
                    self._policy.pop(name, None)

    def _record_policy(self, changes: dict[str, Any]) -> None:
        self._policy.update({name: PolicyChange(**{name: value}) for name, value in changes.items()})

    def count_death(self) -> None:
        """Count a death against every request: one of them may be what killed the engine."""
        for tracked in self._requests.values():
            tracked.num_deaths += 1

    def suspects(self, num_deaths: int) -> list[str]:
        """Return the requests that were in flight in so many deaths."""
        return [name for name, tracked in self._requests.items() if tracked.num_deaths >= num_deaths]

    def open_samples(self, request_id: str) -> set[int]:
        """Return the samples of a request that have not ended; none of one that is over."""
        tracked = self._requests.get(request_id)
        return (
            set() if tracked is None else set(range(tracked.request.sampling.num_samples)) - tracked.finished
        )

    def fail_all(self, error: str) -> list[TokenEvent]:
        """End all requests: return the terminal event of every open sample."""
        return [
            event for request_id in list(self._requests) for event in self.fail(request_id, error, "dead")
        ]

    def settings(self) -> list[Message]:
        """Return the messages that give a new engine the live settings of the dead one."""
        return list(self._policy.values())

    def readmissions(self) -> list[Message]:
        """Return the messages that bring a new engine to the state of the dead one, requests in order of arrival."""
        return [*self.settings(), *map(self.readmission, self._requests)]

    def readmission(self, request_id: str) -> Request:
        """Return the message that lets a request continue after what was delivered of it."""
        tracked = self._requests[request_id]
        return replace(
            tracked.request,
            output_token_ids=tuple(tuple(ids) for ids in tracked.outputs),
            finished_samples=tuple(sorted(tracked.finished)),
        )

    def _finish(self, request_id: str, sample_index: int) -> None:
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.finished.add(sample_index)
            if len(tracked.finished) == tracked.request.sampling.num_samples:
                del self._requests[request_id]

    def fail(self, request_id: str, error: str, error_kind: str) -> list[TokenEvent]:
        """End a request: return the terminal event of each sample that is open."""
        tracked = self._requests.pop(request_id)
        return [
            TokenEvent(
                request_id, index, finish_reason=FinishReason.ERROR, error=error, error_kind=error_kind
            )
            for index in range(tracked.request.sampling.num_samples)
            if index not in tracked.finished
        ]


def continued(request: Request, delivered: Sequence[TokenEvent], vocab_size: int) -> Request:
    """Return a request that goes on behind the events that another engine has delivered.

    Raises:
        RequestError: an event cannot be one of this request.
    """
    num_samples, limit = request.sampling.num_samples, request.sampling.max_tokens
    outputs: list[list[int]] = [[] for _ in range(num_samples)]
    finished: set[int] = set()
    for event in delivered:
        index, ids = event.sample_index, event.token_ids
        if not 0 <= index < num_samples or index in finished:
            raise _not_its_own(f"choice {index} does not exist, or has ended before")
        if not all(0 <= token_id < vocab_size for token_id in ids):
            raise _not_its_own(f"choice {index} has a token id outside of the vocabulary")
        if event.stop_token_id is not None and event.token_ids[-1:] != (event.stop_token_id,):
            raise _not_its_own(f"choice {index} does not end with its stop token")
        outputs[index].extend(ids)
        if limit is not None and len(outputs[index]) > limit:
            raise _not_its_own(f"choice {index} has more than max_tokens = {limit} tokens")
        if event.finish_reason is not None:
            finished.add(index)
    return replace(
        request,
        output_token_ids=tuple(map(tuple, outputs)),
        finished_samples=tuple(sorted(finished)),
    )


def _not_its_own(why: str) -> RequestError:
    return RequestError(f"delivered is not the output of this request: {why}.", param="delivered")

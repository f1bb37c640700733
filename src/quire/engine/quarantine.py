"""`Quarantine`: requests that were in flight in several deaths of an engine have to prove themselves in the next one.

The new engine runs them one at a time, each alone for its first tokens, before anything else. One that kills the engine
then fails. One that passes is taken out again and joins the others later: what was computed of it is computed again,
with the same result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from quire.engine.client import EngineClient
from quire.engine.messages import AbortRequest, Message
from quire.engine.supervisor import InFlight
from quire.errors import EngineDeadError
from quire.metrics.log import Log
from quire.request import Request, TokenEvent

log = Log("supervisor")
TRIAL_STEPS = 4  # with tokens, that a suspect runs alone
KILLED_ALONE = (
    "The engine died of this request alone, after it had died twice with it: it is not tried again."
)


class Quarantine:
    """The trials in one new engine.

    ``lock`` guards ``record``; ``receive``: as `EngineClient.receive`; ``is_closed``: nothing is wanted any more.
    """

    def __init__(
        self,
        client: EngineClient,
        record: InFlight,
        lock: threading.Lock,
        receive: Callable[[EngineClient, float | None], list[TokenEvent]],
        is_closed: Callable[[], bool],
    ) -> None:
        self._client, self._record, self._lock, self._receive = client, record, lock, receive
        self._is_closed = is_closed

    def run(self, num_deaths: int, events: list[TokenEvent]) -> None:
        """Try the requests with so many deaths; add what is to be delivered to ``events``.

        Raises:
            EngineDeadError: one of them has killed the engine, and has failed.
        """
        with self._lock:
            suspects = self._record.suspects(num_deaths)
            for message in self._record.settings() if suspects else []:
                self._client.send(message)
        for request_id in suspects:
            log.warning("suspect_runs_alone", request_id=request_id)
            try:
                self._try(request_id, events)
            except EngineDeadError:
                with self._lock:
                    if self._record.open_samples(request_id):
                        events += self._record.fail(request_id, KILLED_ALONE, "internal")
                raise

    def _try(self, request_id: str, events: list[TokenEvent]) -> None:
        """Run a request for its first tokens, and take it out again."""
        with self._lock:
            if not self._record.open_samples(request_id):  # its client left meanwhile
                return
            events += send_again(self._client, self._record.readmission(request_id), self._record)
        num_steps = 0
        while num_steps < TRIAL_STEPS and self._record.open_samples(request_id):
            if self._is_closed():
                return
            received = self._receive(self._client, None)
            with self._lock:
                self._record.received(received)
            events += received
            num_steps += bool(received)
        self._client.send(AbortRequest(request_id))
        with self._lock:
            still = self._record.open_samples(request_id)
            if still:
                self._record.sent(self._record.readmission(request_id))  # without the deaths
        while still and not self._is_closed():
            received = self._receive(self._client, None)
            still -= {event.sample_index for event in received if event.finish_reason is not None}


def send_again(client: EngineClient, message: Message, record: InFlight) -> list[TokenEvent]:
    """Send what was perhaps recorded while there was no engine; return the end of a request that cannot be sent."""
    try:
        client.send(message)
    except Exception as error:
        log.exception("readmission_failed")
        if isinstance(message, Request):
            text = f"The request cannot be sent to the engine: {type(error).__name__}: {error}"
            return record.fail(message.request_id, text, "internal")
    return []

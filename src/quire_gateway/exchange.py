"""`Exchange`: one request of a client, from its arrival to its end, and what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from starlette.types import Scope, Send

from quire.http.account import Account
from quire.http.body import header
from quire.http.call import Call, call_of
from quire_gateway.asked import Asked
from quire_gateway.catalog import Target
from quire_gateway.config import Cause
from quire_gateway.filtering import Filtering
from quire_gateway.fleet import Backend
from quire_gateway.headers import Pairs
from quire_gateway.limits import Reservation
from quire_gateway.migrate import Continuation
from quire_gateway.quotas import Usage as Reserved
from quire_gateway.sealed import Sealing
from quire_gateway.upstream import BackendFailed
from quire_gateway.usage import Usage

# broken: after the first bytes; left: the client did; filtered: a filter refused the request or the answer
Outcome = Literal["ok", "refused", "failed", "broken", "left", "filtered"]

MAX_NAME_CHARS = 256  # of what a client has named, in rows and logs


@dataclass(slots=True, eq=False)
class Exchange:
    """The state of a request's walk; `Proxy` alone changes it."""

    scope: Scope
    send: Send
    request_id: str
    path: str
    arrival_s: float
    asked: Asked | None = None
    targets: list[Target] = field(default_factory=list)
    tried: set[tuple[int, str]] = field(default_factory=set)  # (life of a backend, model)
    num_attempts: int = 0
    num_deaths: int = 0  # of backends that the request was at
    failures: Counter[str] = field(default_factory=Counter)  # by model: attempts that a retry is paid for
    owed: set[str] = field(default_factory=set)  # models whose next attempt is paid from the retry budget
    closed: set[str] = field(default_factory=set)  # models that get no further attempt
    causes: set[Cause] = field(default_factory=set)  # of the attempts that failed
    promised_by: str | None = None  # the backend that holds a place for it
    holder: str | None = None  # the one backend that holds what it goes on with
    backend: Backend | None = None  # of the last attempt
    target: Target | None = None
    failure: BackendFailed | None = None  # of the last attempt
    extra_headers: Pairs = field(default_factory=list)  # of the answer, from the gateway
    route_headers: Pairs = field(default_factory=list)  # the same, of the last attempt
    has_begun: bool = False  # bytes went to the client
    status: int = 0
    first_s: float | None = None  # of the clock: the first bytes of the answer came
    usage: Usage = field(default_factory=Usage)
    outcome: Outcome = "ok"
    client_left: bool = False
    is_writing: bool = False  # waits for the client to take bytes
    is_reading: bool = False  # waits for the backend, and all that it sent has been relayed
    asked_at: list[Backend] = field(default_factory=list)  # those that have an attempt now: two if hedged
    look: Callable[[], None] | None = None  # called when one of them is lost
    # What `Tenants` knows of it. The ledger's id is the gateway's own: a client may send one request id twice.
    ledger_id: str = ""
    continuation: Continuation | None = None  # with a gateway_key
    filtering: Filtering | None = None  # with filters that read answers
    key: str = ""
    tenant: str = ""
    weight: float = 1.0
    salt: str | None = None  # replaces the client's ``cache_salt``
    sealing: Sealing | None = None  # of the ids in the answer
    reserved: Reserved = field(default_factory=Reserved)
    reservation: Reservation | None = None
    journal_slot: int | None = None
    met_slo: bool = False  # known at the end
    chain: Sequence[bytes] = ()  # digests of the prompt's pieces, of the last attempt

    @property
    def call(self) -> Call:
        return call_of(self.scope)

    @property
    def account(self) -> Account:
        return Account(self.ledger_id, self.tenant, self.key, self.weight, cache_group=self.call.cache_group)

    @property
    def named_model(self) -> str:
        """The name that the client asked for, clipped; empty for none."""
        name = (self.asked.model if self.asked is not None else None) or ""
        return name if len(name) <= MAX_NAME_CHARS else f"{name[: MAX_NAME_CHARS - 1]}…"

    @property
    def trace_id(self) -> str:
        """The trace that the request belongs to: the client's, else one of its own (W3C's trace context)."""
        given = header(self.scope, b"traceparent")
        return given[3:35].decode("latin-1") if given is not None else self.ledger_id

    @property
    def explains(self) -> bool:
        """Whether the client asks why its request goes where it goes."""
        return any(name == b"x-quire-explain" for name, _ in self.scope["headers"])

    @property
    def can_move(self) -> bool:
        """Whether another replica can go on with the stream that the client has the beginning of."""
        return self.has_begun and self.continuation is not None and self.continuation.can_move

    def may_go_to(self, backend: Backend, model: str) -> bool:
        """Whether a backend may take the next attempt: every one, until bytes went to the client."""
        if not self.has_begun:
            return True
        assert self.continuation is not None
        return backend.fingerprints.get(model) == self.continuation.fingerprint

    def watch(self, backend: Backend) -> None:
        """An attempt begins at a backend."""
        self.asked_at.append(backend)
        if self.look is not None:
            backend.watchers.add(self.look)

    def unwatch(self, backend: Backend) -> None:
        """It has ended."""
        self.asked_at.remove(backend)
        if self.look is not None:
            backend.watchers.discard(self.look)

    def restart(self) -> None:
        """The client has nothing yet, and the next attempt begins the answer: nothing of the last one is billed."""
        self.usage, self.first_s = Usage(), None
        if self.continuation is not None:
            self.continuation.restart()
        if self.filtering is not None:
            self.filtering.reset()

    async def begin(self, status: int, headers: Pairs) -> None:
        """Send the head of the answer; from now on no other backend can answer instead."""
        self.has_begun = True
        self.status = status
        await self.send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *self.extra_headers, *self.route_headers],
            }
        )

    async def write(self, data: bytes) -> None:
        self.is_writing = True
        data = data if self.sealing is None else self.sealing.frames(data)
        await self.send({"type": "http.response.body", "body": data, "more_body": True})
        self.is_writing = False

    async def end(self, data: bytes = b"") -> None:
        data = data if self.sealing is None else self.sealing.frames(data)
        await self.send({"type": "http.response.body", "body": data, "more_body": False})

    async def answer(self, status: int, headers: Pairs, body: bytes) -> None:
        """Send a whole answer."""
        body = body if self.sealing is None else self.sealing.whole(status, body)
        await self.begin(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

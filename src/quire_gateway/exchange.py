"""`Exchange`: one request of a client, from its arrival to its end, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from starlette.types import Scope

from quire.http.account import Account
from quire.http.body import header
from quire.http.call import Call, call_of
from quire.http.limits import NAME_CHARS
from quire_gateway.answer import Answer
from quire_gateway.attempts import Attempts
from quire_gateway.catalog import Target
from quire_gateway.client_request import ClientRequest
from quire_gateway.fleet import Backend
from quire_gateway.quotas import Usage as Reserved
from quire_gateway.usage import Usage

if TYPE_CHECKING:  # a stage, which is off without a key that replicas know
    from quire_gateway.migrate import Continuation

# broken: after the first bytes; left: the client did; filtered: a filter refused the request or the answer
Outcome = Literal["ok", "refused", "failed", "broken", "left", "filtered"]


@dataclass(slots=True, eq=False)
class Exchange:
    """What all parts of the gateway share of a request; what concerns one stage alone, the stage keeps."""

    scope: Scope
    answer: Answer
    # The gateway's own id, since a client may send one request id twice.
    ledger_id: str
    arrival_s: float
    request: ClientRequest | None = None  # None until the body was read
    targets: list[Target] = field(default_factory=list)
    reserved: Reserved = field(default_factory=Reserved)  # what it may use at most
    attempts: Attempts = field(default_factory=Attempts)
    continuation: Continuation | None = None  # what another replica would need to go on with the answer
    usage: Usage = field(default_factory=Usage)
    outcome: Outcome = "ok"

    @property
    def call(self) -> Call:
        return call_of(self.scope)

    @property
    def request_id(self) -> str:
        return self.call.request_id

    @property
    def path(self) -> str:
        path: str = self.scope["path"]
        return path

    @property
    def key(self) -> str:
        """The name of the client's key; empty without one."""
        key = self.call.key
        return key.name if key is not None else ""

    @property
    def tenant(self) -> str:
        key = self.call.key
        return key.tenant if key is not None else self.call.tenant

    @property
    def account(self) -> Account:
        key = self.call.key
        weight = key.weight if key is not None else 1.0
        return Account(self.ledger_id, self.tenant, self.key, weight, cache_group=self.call.cache_group)

    @property
    def backend(self) -> Backend | None:
        """The backend of the last attempt."""
        return self.attempts.backend

    @property
    def target(self) -> Target | None:
        """The target of the last attempt."""
        return self.attempts.target

    @property
    def named_model(self) -> str:
        """The name that the client asked for, clipped; empty for none."""
        name = (self.request.model if self.request is not None else None) or ""
        return name if len(name) <= NAME_CHARS else f"{name[: NAME_CHARS - 1]}…"

    @property
    def trace_id(self) -> str:
        """The trace that the request belongs to: the client's, else one of its own (W3C's trace context)."""
        traceparent = header(self.scope, b"traceparent")
        return traceparent[3:35].decode("latin-1") if traceparent is not None else self.ledger_id

    @property
    def explains(self) -> bool:
        """Whether the client asks why its request goes where it goes."""
        return any(name == b"x-quire-explain" for name, _ in self.scope["headers"])

    @property
    def can_move(self) -> bool:
        """Whether another replica can go on with the stream that the client has the beginning of."""
        return self.answer.has_begun and self.continuation is not None and self.continuation.can_move

    def may_go_to(self, backend: Backend, model: str) -> bool:
        """Whether a backend may take the next attempt: every one, until bytes went to the client."""
        if not self.answer.has_begun:
            return True
        assert self.continuation is not None
        return backend.fingerprints.get(model) == self.continuation.fingerprint

    def restart(self) -> None:
        """The client has nothing yet, and the next attempt begins the answer: nothing of the last one is billed."""
        self.usage = Usage()
        self.answer.restart()
        if self.continuation is not None:
            self.continuation.restart()

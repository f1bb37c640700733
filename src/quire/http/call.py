"""`Call`: one request as the edge has named it, and for whom it runs.

`quire.http.edge.Edge` makes it from headers and keys and puts it into the ASGI scope; `call_of` takes it out. From the
endpoint on it is an argument. What this process asks itself (`quire.http.client.post_local`) brings a call of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.types import Scope

from quire.errors import RequestError, clip
from quire.http.account import Account
from quire.request import SEED_BITS, Deadline, KvTerms, Tenant, Terms

if TYPE_CHECKING:
    from quire.http.keys import ApiKey

MAX_REQUEST_ID_CHARS = 128
_SEED_MASK = (1 << SEED_BITS) - 1
SCOPE_KEY = "quire.call"  # in the ASGI scope: the call


class AnswerName(NamedTuple):
    """What an answer is called that may go on elsewhere, as a gateway, the journal or a background response says."""

    id: str  # 32 hexadecimal digits
    created: int  # seconds since 1970
    seed: int  # for a request that gives none

    def __str__(self) -> str:
        return f"{self.id} {self.created} {self.seed}"

    def seed_of(self, prompt: int) -> int:
        """Return the seed of a prompt of the request, counted from 0."""
        return (self.seed + prompt) & _SEED_MASK

    @classmethod
    def read(cls, text: str) -> AnswerName:
        """Return what `str` has written, the value of ``x-quire-answer``.

        Raises:
            RequestError: it is wrong.
        """
        try:
            answer_id, created, seed = text.split(" ")
            int(answer_id, 16)
            if len(answer_id) == 32 and int(created) >= 0 and 0 <= int(seed) <= _SEED_MASK:
                return cls(answer_id, int(created), int(seed))
        except ValueError:
            pass
        raise RequestError(
            f"x-quire-answer = {clip(text)} is not allowed: it must be '<32 hexadecimal digits> <created> <seed>'."
        )


@dataclass(frozen=True, slots=True)
class Call:
    """One request: its name, its rights, and what this process or a gateway says of it."""

    request_id: str = ""  # under which it is logged and answered
    draws_id: bool = False  # no header named the request, so its body may
    # The tenant of the key that let it in, here or at its gateway; empty: there was no key.
    tenant: str = ""
    # The tenants of a group share cached blocks; empty: the tenant is a group of its own.
    cache_group: str = ""
    weight: float = 1.0  # the tenant's share of the engine under the order "fair"
    key: ApiKey | None = None  # the line of the key file that let it in
    account: Account | None = None  # the gateway's, which is told what the request uses
    is_local: bool = False  # this process asks: a full queue does not refuse it
    priority: int | None = None  # replaces the body's
    runs_in_background: bool = False  # a response may go on without its client
    answer: AnswerName | None = None
    kv: KvTerms | None = None  # see `quire.api.disaggregation`

    @property
    def salt_group(self) -> str:
        """Within which its cached blocks are shared."""
        return self.cache_group or self.tenant

    def terms(self, *, user: str, priority: int, salt: str, deadline: Deadline | None) -> Terms:
        """Return the terms of the request with what its body says. ``user`` is the tenant of a call without one."""
        return Terms(
            Tenant(self.tenant or user, self.weight),
            priority if self.priority is None else self.priority,
            cache_salt(self.salt_group, salt) if salt or self.tenant or self.cache_group else "",
            deadline,
            self.kv,
        )


_NONE = Call()


def cache_salt(group: str, salt: str) -> str:
    """Return the salt of a request whose tenant shares cached blocks within ``group``; "": it has no tenant.

    Tenants share no cached blocks: the time to a first token would tell what another one has asked. No client can
    choose a salt that ends up as that of another group: a group's begins with its name and a line's end, and a salt
    without a group that has one is moved behind an empty name.
    """
    return f"{group}\n{salt}" if group or "\n" in salt else salt


def call_of(scope: Scope) -> Call:
    """Return the call of a request; one without name and tenant where no edge was passed."""
    call: Call = scope.get(SCOPE_KEY, _NONE)
    return call


def put_call(scope: Scope, call: Call) -> Call:
    """Have `call_of` find ``call``, and return it."""
    scope[SCOPE_KEY] = call
    return call


def adopt_request_id(scope: Scope, request_id: str | None) -> Call:
    """Take the id from the body (vLLM's ``request_id``, SGLang's ``rid``) unless a header named the request."""
    call, usable = call_of(scope), usable_request_id(request_id)
    return put_call(scope, replace(call, request_id=usable)) if usable is not None and call.draws_id else call


def usable_request_id(value: Any) -> str | None:
    """Return a client's own request id if it is fit for a header and a log line, else None."""
    if isinstance(value, bytes):
        value = value.decode("latin-1")
    if not isinstance(value, str) or not 0 < len(value) <= MAX_REQUEST_ID_CHARS:
        return None
    return value if value.isascii() and value.isprintable() else None

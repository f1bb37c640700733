"""What a gateway and its replicas of Quire tell each other of a request: for whom it runs, and what it has used.

x-quire-gateway-key   the key of --gateway-key; without it a replica ignores the gateway's other headers
x-quire-account       "<id> <weight> <tenant or -> <key's name or ->"; the id is that of the ledger's row
x-quire-ledger        the id of the ledger that the request is booked in: gateways of another one do not book it
x-quire-cache-group   within which the tenant shares cached blocks, where that is not the tenant alone
x-quire-second        the same request runs elsewhere, too: what it uses here is not noted
x-quire-cost          "<engine-seconds> <KV-block-seconds>" of such a request, with its whole answer. A tagged stream
                      ends with a group of no events that has them: ``:0 0 <engine-seconds> <KV-block-seconds>``
"""

from __future__ import annotations

import hmac
import math
from dataclasses import dataclass

import msgspec
from starlette.types import Scope

from quire.http.body import header
from quire.http.refusals import HttpError, Refusal

# A path of a replica: the `Used` of the requests that have ended.
USAGE_PATH = "/gateway/usage"
COST_HEADER = "x-quire-cost"
MAX_LEDGER_CHARS = 64
_NONE = "-"  # no name of a tenant or key begins with it


@dataclass(frozen=True, slots=True)
class Account:
    """For whom a request runs."""

    request_id: str
    tenant: str = ""
    key: str = ""  # its name
    weight: float = 1.0  # share of the engine under the order "fair"
    ledger: str = ""  # id of the ledger that has its row; empty where none is known
    cache_group: str = ""  # group of the tenant

    def headers(self, *, is_second: bool = False) -> list[tuple[str, str]]:
        """Return what tells a replica; ``is_second``: beside another attempt at the same request."""
        names = f"{self.tenant or _NONE} {self.key or _NONE}"
        headers = [("x-quire-account", f"{self.request_id} {self.weight:g} {names}")]
        if self.cache_group and self.cache_group != self.tenant:
            headers.append(("x-quire-cache-group", self.cache_group))
        return [*headers, ("x-quire-second", "1")] if is_second else headers


class Used(msgspec.Struct, frozen=True, array_like=True):
    """What one request has used at a replica, where it has ended."""

    number: int  # rises with each request, also across restarts of the replica
    request_id: str
    finished_at: float  # Unix time in seconds
    tenant: str
    key: str
    model: str
    endpoint: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    e2el_ms: float
    ledger: str = ""  # ledger of the account
    engine_s: float = 0.0
    kv_block_s: float = 0.0


class UsedPage(msgspec.Struct, frozen=True):
    """An answer of `USAGE_PATH`."""

    since: float  # Unix time in seconds: the replica's start
    data: list[Used]
    has_more: bool = False


def ledger_header(ledger_id: str) -> list[tuple[str, str]]:
    """Return what names the ledger of a request; nothing where its id is not known."""
    return [("x-quire-ledger", ledger_id)] if ledger_id else []


def cost_text(engine_s: float, kv_block_s: float) -> bytes:
    return b"%.6f %.6f" % (engine_s, kv_block_s)


def cost_of(text: str) -> tuple[float, float]:
    """Return the engine-seconds and KV-block-seconds of `cost_text`; raises `ValueError` for another text."""
    engine_s, kv_block_s = map(float, text.split(" "))
    if not (0.0 <= engine_s < math.inf and 0.0 <= kv_block_s < math.inf):
        raise ValueError(f"{text!r} is no cost")
    return engine_s, kv_block_s


def has_gateway_key(scope: Scope, key: str | None) -> bool:
    """Whether the request carries the gateway's key; the comparison takes constant time."""
    value = header(scope, b"x-quire-gateway-key")
    return key is not None and value is not None and hmac.compare_digest(value, key.encode())


def check_gateway_key(scope: Scope, key: str | None) -> None:
    """Raise `HttpError` (403) without the gateway's key."""
    if not has_gateway_key(scope, key):
        text = f"{scope['path']} is for a gateway with the key of --gateway-key alone."
        raise HttpError(Refusal(403, text, code="forbidden"))


def read_account(scope: Scope, key: str) -> Account | None:
    """Return for whom a gateway with ``key`` says that the request runs; None where it says nothing."""
    line = header(scope, b"x-quire-account")
    if line is None or not has_gateway_key(scope, key):
        return None
    try:
        request_id, weight, tenant, name = line.decode("ascii").split(" ")
        names = tenant.removeprefix(_NONE), name.removeprefix(_NONE)
        ledger = header(scope, b"x-quire-ledger") or b""
        group = (header(scope, b"x-quire-cache-group") or b"").decode("ascii")
        account = Account(request_id, *names, float(weight), ledger.decode("ascii")[:MAX_LEDGER_CHARS], group)
    except ValueError:
        return None
    return account if 0.001 <= account.weight <= 1000.0 else None


def is_second(scope: Scope) -> bool:
    """Whether the same request runs elsewhere, too, which notes what it uses."""
    return header(scope, b"x-quire-second") is not None

"""`Rights`: for whom a request runs, as its key or its gateway says. Keys are compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from starlette.types import Scope

from quire.http.account import is_second, read_account
from quire.http.body import header
from quire.http.call import Call
from quire.http.refusals import HttpError, Refusal

if TYPE_CHECKING:
    from quire.http.keys import KeyFile

# Probes and scrapers send no key, as with vLLM; the two pages have nothing of the model without one.
OPEN_PATHS = frozenset({"/", "/docs", "/livez", "/readyz", "/startupz", "/health", "/version", "/metrics"})


class Rights:
    """Says for whom a request runs, and refuses one whose key does not suffice."""

    def __init__(self, api_keys: Sequence[str], key_file: KeyFile | None, gateway_key: str | None) -> None:
        self._keys = [key.encode() for key in api_keys]
        self._has_keys = bool(api_keys) or key_file is not None
        self._key_file = key_file
        self._gateway_key = gateway_key

    def of(self, call: Call, scope: Scope) -> Call:
        """Return the call with the rights of the request's key, and for whom its gateway says that it runs.

        Raises:
            HttpError: the request's key does not suffice.
        """
        if self._has_keys and scope["path"] not in OPEN_PATHS:
            call = self._with_key(call, scope)
        return call if self._gateway_key is None else self._with_account(call, scope, self._gateway_key)

    def _with_account(self, call: Call, scope: Scope, gateway_key: str) -> Call:
        """Return the call as a gateway with the key says for whom it runs."""
        account = read_account(scope, gateway_key)
        if account is None:
            return call
        if not is_second(scope):
            call = replace(call, account=account)
        if not account.tenant:
            return call
        return replace(call, tenant=account.tenant, cache_group=account.cache_group, weight=account.weight)

    def _with_key(self, call: Call, scope: Scope) -> Call:
        """Return the call with the rights of the request's key.

        Raises:
            HttpError: the request's key does not suffice.
        """
        keys = keys_of(scope)
        # Each comparison takes constant time, which reveals neither a length nor where a difference is.
        matches = [hmac.compare_digest(one, key) for one in keys for key in self._keys]
        if any(matches):
            return call
        table = self._key_file.table() if self._key_file is not None else None
        known = next((key for one in keys if table and (key := table.find(one)) is not None), None)
        if known is None or table is None:
            text = (
                "Missing or wrong API key: send the header Authorization: Bearer <key> (or x-api-key: <key>)."
            )
        elif known.is_expired(datetime.now(UTC)):
            text = f"The API key {known.name!r} has expired."
        elif not known.allows_endpoint(scope["path"]):
            allowed = ", ".join(known.endpoints)
            text = f"The API key {known.name!r} may not call {scope['path']}; it may call {allowed}."
            raise HttpError(Refusal(403, text, code="forbidden"))
        else:
            group = table.group_of(known.tenant)
            return replace(call, key=known, tenant=known.tenant, cache_group=group, weight=known.weight)
        challenge = ((b"www-authenticate", b"Bearer"),)
        raise HttpError(Refusal(401, text, code="invalid_api_key", headers=challenge))


def keys_of(scope: Scope) -> list[bytes]:
    kind, _, token = (header(scope, b"authorization") or b"").partition(b" ")
    keys = [token.strip()] if kind.lower() == b"bearer" else []
    other = header(scope, b"x-api-key")  # the header of Anthropic's clients
    return keys if other is None else [*keys, other]


def holds_key(scope: Scope, key: str | None) -> bool:
    """Whether a request has ``key``; no request has one that is not set."""
    return key is not None and any(hmac.compare_digest(one, key.encode()) for one in keys_of(scope))

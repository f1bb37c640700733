"""Which headers pass the gateway, in either direction (RFC 9110, 7.6.1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from starlette.types import Scope

from quire.http.account import COST_HEADER
from quire.http.body import header
from quire.http.cache_messages import BLOCKS_HEADER

Pairs = list[tuple[bytes, bytes]]
TAGGED = b"x-quire-tagged"  # of a replica's answer: the fingerprint of what the stream depends on
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
     b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip
# What a browser says of its page: the gateway has judged it, and a backend has another name and other pages.
_OF_PAGES = frozenset((b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest", b"sec-fetch-user"))
# Set anew for each backend. Answers must be readable here, so no coding is asked for.
_REPLACED = frozenset(
    (
        b"host",
        b"content-length",
        b"content-encoding",
        b"accept-encoding",
        b"expect",
        b"x-request-id",
        b"x-forwarded-for",
    )
)
_KEYS = frozenset((b"authorization", b"x-api-key"))
_OWN_PREFIX = b"x-quire-"
# Of an answer: what the gateway's own server writes. Its body has been decoded.
_WRITTEN_ANEW = frozenset(
    (
        b"content-encoding",
        b"content-length",
        b"date",
        b"server",
        b"x-request-id",
        TAGGED,
        BLOCKS_HEADER.encode(),
        COST_HEADER.encode(),
    )
)


def to_backend(
    scope: Scope, request_id: str, api_key: str | None, *, pass_keys: bool, trace_id: str
) -> list[tuple[str, str]]:
    """Return the headers of the request to a backend.

    ``api_key``: the backend's own, which replaces the client's. Without one the client's key passes only where the
    gateway checks no keys itself. Headers that begin with ``x-quire-`` are the gateway's to set. A request without
    ``traceparent`` begins the trace ``trace_id`` (32 hexadecimal digits).
    """
    pairs = scope["headers"]
    dropped = _HOP_BY_HOP | _REPLACED | _OF_PAGES | _named_by_connection(pairs)
    if api_key is not None or not pass_keys:
        dropped |= _KEYS
    headers = [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in pairs
        if name not in dropped and not name.startswith(_OWN_PREFIX)
    ]
    if api_key is not None:
        headers.append(("authorization", f"Bearer {api_key}"))
    client = scope.get("client")
    came_through = (header(scope, b"x-forwarded-for") or b"").decode("latin-1")
    hops = [*filter(None, [came_through]), *([client[0]] if client else [])]
    if hops:
        headers.append(("x-forwarded-for", ", ".join(hops)))
    if header(scope, b"traceparent") is None:
        headers.append(("traceparent", f"00-{trace_id}-{trace_id[16:]}-01"))
    return [*headers, ("x-request-id", request_id), ("accept-encoding", "identity")]


def to_client(raw: Sequence[tuple[bytes, bytes]]) -> Pairs:
    """Return the headers of a backend's answer that its client sees."""
    pairs = [(name.lower(), value) for name, value in raw]
    dropped = _HOP_BY_HOP | _WRITTEN_ANEW | _named_by_connection(pairs)
    return [(name, value) for name, value in pairs if name not in dropped and _is_clean(name, value)]


def _is_clean(name: bytes, value: bytes) -> bool:
    """Whether a header can be written as one line."""
    return not any(byte in name + value for byte in b"\r\n\0")


def _named_by_connection(pairs: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """Return the headers that ``connection`` declares to be of one hop only."""
    named = (
        token.strip().lower() for name, value in pairs if name == b"connection" for token in value.split(b",")
    )
    return frozenset(named)

"""Reading a request's body under limits, and writing answers (JSON, server-sent events), directly on ASGI."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from quire.errors import RequestError
from quire.http.limits import INLINE_BYTES, SMALL_BYTES, SMALL_ELEMENTS, check_fields, takes_long
from quire.http.refusals import OLLAMA_ROOT, HttpError, Refusal

Headers = Sequence[tuple[bytes, bytes]]
DecodeLarge = Callable[[Sequence[bytes]], Awaitable[Any]]  # the pieces of a body → its value
JSON_TYPE = (b"content-type", b"application/json")
BROWSER_HEADERS = (b"origin", b"sec-fetch-site", b"referer")
# The key in the ASGI scope of what `quire.http.held_bytes` holds of the request.
HELD_BODY = "quire.held_body"

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class Disconnected(Exception):
    """The client disconnected before its request was read."""


async def read_json(scope: Scope, receive: Receive, max_bytes: int) -> Any:
    """Return the decoded body of a small request (`INLINE_BYTES` at most), checked against the limits of fields.

    Raises:
        HttpError: 413 beyond ``max_bytes``, 415 for another media type.
        RequestError: not JSON, or a field above its limit.
    """
    flag = "--max-body-mib" if max_bytes < INLINE_BYTES else "fixed for this path"
    return await decode_body([await read_bytes(scope, receive, min(max_bytes, INLINE_BYTES), flag)])


async def read_bytes(scope: Scope, receive: Receive, max_bytes: int, flag: str) -> bytes:
    """Return a body of JSON, undecoded. Raises what `body_pieces` does, and `HttpError` 415."""
    return b"".join(await read_pieces(scope, receive, max_bytes, flag))


async def read_pieces(scope: Scope, receive: Receive, max_bytes: int, flag: str) -> list[bytes]:
    """As `read_bytes`, in pieces: joining a large body takes long."""
    _check_media_type(scope)
    first: Message | None = None
    length = header(scope, b"content-length") or b"0"
    is_coded = header(scope, b"content-encoding") is not None
    if not is_coded and length.isdigit() and int(length) <= max_bytes:
        first = await receive()
        if not first.get("more_body", False) and len(body := first.get("body", b"")) <= max_bytes:
            if first["type"] == "http.disconnect":
                raise Disconnected
            return [body]
    long_body = import_module("quire.http.long_body")
    return [piece async for piece in long_body.body_pieces(scope, receive, max_bytes, flag, first)]


async def decode_body(pieces: list[bytes], decode_large: DecodeLarge | None = None) -> Any:
    """Return the value of a body, checked against the limits of fields.

    The last of duplicate keys wins, as in other JSON parsers; NaN and Infinity are not JSON. ``decode_large`` does the
    same for a body that takes long, outside of this process.

    Raises:
        RequestError: not JSON, or a field above its limit.
    """
    if len(pieces) == 1 and len(raw := pieces[0]) <= SMALL_BYTES and raw.count(b",") < SMALL_ELEMENTS:
        return decode(raw)  # no list and no text in it is beyond a limit
    if decode_large is not None and takes_long(pieces):
        return await decode_large(pieces)
    body = decode(b"".join(pieces))
    check_fields(body)
    return body


def decode(raw: bytes) -> Any:
    """Decode JSON from a client.

    Raises:
        RequestError: ``raw`` is not JSON, or nested too deeply.
    """
    try:
        return _decode(raw)
    except RecursionError:
        reason = "it is nested too deeply"
    except (msgspec.DecodeError, UnicodeError) as error:
        reason = str(error)
    shown = "The body is empty" if not raw else "The body is not JSON"
    raise RequestError(
        f"{shown}: {reason}. Send a JSON object in UTF-8 (NaN and Infinity are not JSON).",
        code="invalid_json",
    )


async def send_json(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    """Send a whole JSON answer."""
    all_headers = [JSON_TYPE, (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return a request header (``name`` in lower case), or None."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


def _check_media_type(scope: Scope) -> None:
    media_type = (header(scope, b"content-type") or b"application/json").split(b";")[0].strip().lower()
    if scope["path"].startswith(OLLAMA_ROOT) and not any(header(scope, name) for name in BROWSER_HEADERS):
        # Ollama reads every type as JSON, and its examples with curl send a form's.
        return
    if media_type != b"application/json" and not media_type.endswith(b"+json"):
        # Browsers send other types across origins without a preflight; a server on localhost must refuse those.
        raise HttpError(
            Refusal(
                415,
                f"Content-Type {media_type.decode('latin-1')!r} is not supported: send application/json "
                "(curl: -H 'Content-Type: application/json').",
                code="unsupported_media_type",
            )
        )

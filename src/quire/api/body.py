"""Reading a request's body under limits, and writing an answer, straight on ASGI."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.api.refusals import HttpError, Refusal
from quire.errors import RequestError

Headers = Sequence[tuple[bytes, bytes]]
JSON_TYPE = (b"content-type", b"application/json")

_decode = msgspec.json.Decoder().decode


class Disconnected(Exception):
    """The client went away before its request was read."""


async def read_json(scope: Scope, receive: Receive, max_bytes: int) -> Any:
    """Return the decoded body.

    Duplicate keys keep the last value, as JSON parsers do; NaN and Infinity are not JSON.

    Raises:
        HttpError: 413 beyond ``max_bytes``, 415 for another media type.
        RequestError: not JSON.
    """
    _check_media_type(scope)
    return decode(await read_body(receive, max_bytes, "--max-body-mib", header(scope, b"content-length")))


async def read_body(receive: Receive, max_bytes: int, flag: str, length: bytes | None) -> bytes:
    """Return the body. ``flag`` is what sets the limit, ``length`` the header content-length.

    Raises:
        HttpError: 413 beyond ``max_bytes``.
    """
    if length is not None and length.isdigit() and int(length) > max_bytes:
        raise _too_large(length.decode(), max_bytes, flag)
    parts = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        part = message.get("body", b"")
        size += len(part)
        if size > max_bytes:
            raise _too_large(f"over {max_bytes}", max_bytes, flag)
        parts.append(part)
        if not message.get("more_body", False):
            break
    return b"".join(parts)


def decode(raw: bytes) -> Any:
    """Decode JSON from a stranger."""
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


def json_response(value: object, status: int = 200) -> Response:
    """Return a JSON answer of a handler."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


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
    if media_type != b"application/json" and not media_type.endswith(b"+json"):
        # A browser sends other types across origins without asking; a server on localhost must not obey those.
        raise HttpError(
            Refusal(
                415,
                f"Content-Type {media_type.decode('latin-1')!r} is not supported: send application/json "
                "(curl: -H 'Content-Type: application/json').",
                code="unsupported_media_type",
            )
        )


def _too_large(size: str, max_bytes: int, flag: str) -> HttpError:
    return HttpError(
        Refusal(
            413,
            f"The body has {size} bytes; at most {max_bytes} are allowed ({flag}).",
            code="body_too_large",
        )
    )

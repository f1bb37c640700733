"""Reading a request's body under limits, and writing answers (JSON, server-sent events), directly on ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from quire.errors import RequestError, clip
from quire.http.limits import INLINE_BYTES, SMALL_BYTES, SMALL_ELEMENTS, check_fields, takes_long
from quire.http.refusals import OLLAMA_ROOT, HttpError, Refusal
from quire.http.wire import not_allowed

Headers = Sequence[tuple[bytes, bytes]]
DecodeLarge = Callable[[Sequence[bytes]], Awaitable[Any]]  # the pieces of a body → its value
JSON_TYPE = (b"content-type", b"application/json")
STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not hold the stream back
)
BROWSER_HEADERS = (b"origin", b"sec-fetch-site", b"referer")
# The key in the ASGI scope of what `quire.http.held_bytes` holds of the request.
HELD_BODY = "quire.held_body"
STREAM_DONE = b"data: [DONE]\n\n"  # the end of OpenAI's streams

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
    flag = "--max-body-mib" if max_bytes <= INLINE_BYTES else "fixed for this path"
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
    return [piece async for piece in body_pieces(scope, receive, max_bytes, flag, first)]


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


async def body_pieces(
    scope: Scope, receive: Receive, max_bytes: int, flag: str, first: Message | None = None
) -> AsyncGenerator[bytes, None]:
    """Yield the body in pieces as they arrive. ``flag`` is the server's flag that sets the limit.

    ``first``: the message that was received already.

    A body that the client has coded is yielded as it was before, and ``max_bytes`` holds for both.

    Raises:
        HttpError: 413 beyond ``max_bytes``, 415 for a coding that is not known.
        RequestError: the body is not of its coding.
        Disconnected: the client left before the end.
    """
    coding = header(scope, b"content-encoding")
    decoder = None
    if coding is not None:
        from quire.http.codings import decoder_of

        decoder = decoder_of(coding)
    length = header(scope, b"content-length")
    if length is not None and length.isdigit() and int(length) > max_bytes:
        raise _too_large(length.decode(), max_bytes, flag)
    size, decoded_size, more = 0, 0, True
    while more:
        message = await receive() if first is None else first
        first = None
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece = message.get("body", b"")
        size += len(piece)
        if size > max_bytes:
            raise _too_large(f"over {max_bytes}", max_bytes, flag)
        more = message.get("more_body", False)
        if decoder is None:
            yield piece
            continue
        for part in decoder.decode(piece):
            decoded_size += len(part)
            if decoded_size > max_bytes:
                raise _too_large(f"over {max_bytes}", max_bytes, flag)
            if (held := scope.get(HELD_BODY)) is not None:
                held.take(len(part))
            yield part
            await asyncio.sleep(0)  # other requests have their turn
    if decoder is not None:
        decoder.end()


def json_response(value: object, status: int = 200) -> Response:
    """Return the JSON answer of a handler."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def page_of(request: Request, items: list[dict[str, Any]], *, default: int, most: int) -> Response:
    """Answer with one page of a list in OpenAI's form, the newest item first.

    The query has ``limit`` (``default``, at most ``most``), ``after`` (the last id of the previous page) and ``order``.

    Raises:
        RequestError: names the part of the query that is wrong.
    """
    query = request.query_params
    order, after = query.get("order", "desc"), query.get("after")
    limit = query.get("limit", str(default))
    if not limit.isascii() or not limit.isdigit() or len(limit) > 9 or not 1 <= int(limit) <= most:
        raise not_allowed("limit", limit, f"an integer in 1…{most}")
    if order not in ("asc", "desc"):
        raise not_allowed("order", order, "'asc' or 'desc'")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise RequestError(f"after = {clip(after)} is not an id of this list.", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[: int(limit)]
    return json_response(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(page) < len(ordered),
        }
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
        return  # Ollama reads every type as JSON, and its examples with curl send a form's
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


def _too_large(size: str, max_bytes: int, flag: str) -> HttpError:
    message = f"The body has {size} bytes; at most {max_bytes} are allowed ({flag})."
    return HttpError(Refusal(413, message, code="body_too_large"))


def named_event(kind: str, values: dict[str, Any]) -> bytes:
    """Return an event whose name is also the ``type`` of its JSON."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **values}))


def first_data(stream: bytes) -> Any:
    """Return the JSON of the first event in ``stream``."""
    data = next(line for line in stream.split(b"\n") if line.startswith(b"data: "))
    return msgspec.json.decode(data.removeprefix(b"data: "))

"""`read_form`: the form in which a client uploads a file, of bounded size."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.types import Receive, Scope

from quire.errors import RequestError
from quire.http.limits import CONTENT_TYPE_BYTES, FORM_HEADER_BYTES, FORM_PARTS, too_many
from quire.http.long_body import body_pieces

FORM_BYTES = FORM_PARTS * FORM_HEADER_BYTES  # for everything in a form but its file


@asynccontextmanager
async def read_form(scope: Scope, receive: Receive, max_file_bytes: int) -> AsyncGenerator[FormData, None]:
    """Yield the form; its temporary files are removed when the block ends.

    Raises:
        HttpError: 413 for a body that is too large.
        RequestError: another media type, or a malformed body.
    """
    headers = Headers(scope=scope)
    content_type = headers.get("content-type", "")
    kind, options = parse_options_header(content_type[:CONTENT_TYPE_BYTES])
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise RequestError(
            f"Content-Type {content_type[:80]!r} is not allowed here: send multipart/form-data with a boundary "
            "(curl: -F purpose=batch -F file=@lines.jsonl).",
            code="invalid_multipart",
        )
    pieces = body_pieces(scope, receive, max_file_bytes + FORM_BYTES, "--max-file-mib")
    parser = _Parser(headers, pieces)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise _malformed(error.message.rstrip(".")) from error
    try:
        if not parser.ended:
            raise _malformed("it does not end with its boundary")
        yield form
    finally:
        await form.close()


class _Parser(MultiPartParser):
    """Starlette's parser, which also tells whether the final boundary was there."""

    def __init__(self, headers: Headers, stream: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers, stream)
        self.ended = False
        self._num_parts = 0
        self._header_bytes = 0  # bytes of this part

    def on_part_begin(self) -> None:
        self._num_parts += 1
        self._header_bytes = 0
        if self._num_parts > FORM_PARTS:
            raise too_many("The form", self._num_parts, FORM_PARTS, "parts or more")
        super().on_part_begin()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        super().on_header_field(data, start, end)

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        super().on_header_value(data, start, end)

    def _count_header(self, num_bytes: int) -> None:
        self._header_bytes += num_bytes
        if self._header_bytes > FORM_HEADER_BYTES:
            what = f"The header of part {self._num_parts}"
            raise too_many(what, self._header_bytes, FORM_HEADER_BYTES, "bytes or more")

    def on_end(self) -> None:
        self.ended = True


def _malformed(why: str) -> RequestError:
    return RequestError(f"The body is not multipart/form-data: {why}.", code="invalid_multipart")

"""`FileStore`: the files that clients uploaded or that batches wrote, under ``--batch-dir``.

files/ID.json    the object of ``/v1/files/ID``; written last, so a file exists completely or not at all
files/ID.data    its bytes
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, Headers
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.types import Receive, Scope

from quire.errors import RequestError
from quire.http.limits import CONTENT_TYPE_BYTES, FORM_HEADER_BYTES, FORM_PARTS, too_many
from quire.http.long_body import body_pieces
from quire.http.refusals import HttpError, Refusal
from quire.jobs.disk import removed_on_failure, write_json
from quire.private import private_folder, written_anew

MAX_FILES = 10_000
MAX_STORE_BYTES = 10 * 2**30
_ID = re.compile(r"file-[0-9a-f]{32}")


class FileStore:
    """Files by id; a tenant finds its own alone. Nothing is cached: there are few, and a restart changes nothing."""

    def __init__(
        self,
        root: Path,
        new_id: Callable[[], str],
        unix_time: Callable[[], float],
        max_bytes: int = MAX_STORE_BYTES,
    ) -> None:
        """``max_bytes``: of all files, beyond which uploads are refused; what batches write always has room."""
        self._max_bytes = max_bytes
        self._folder = root / "files"
        private_folder(self._folder, files="*")
        self._new_id = new_id
        self._unix_time = unix_time
        for left in self._folder.glob("*.tmp"):  # a server died while it wrote
            left.unlink()

    def add(
        self, source: BinaryIO, filename: str, purpose: str, tenant: str, expires_after_s: int | None = None
    ) -> dict[str, Any]:
        """Copy ``source`` and return its file object. Only ``tenant`` may read it.

        Raises:
            HttpError: 507 where there are too many files, or too many bytes in them.
        """
        self._check_room(source.seek(0, os.SEEK_END))
        source.seek(0)
        file_id = f"file-{self._new_id()}"
        with removed_on_failure(self.path(file_id)):
            with written_anew(self.path(file_id)) as file:
                shutil.copyfileobj(source, file)
            return self._describe(file_id, filename, purpose, tenant, expires_after_s)

    def adopt(
        self, path: Path, filename: str, purpose: str, tenant: str, expires_after_s: int | None = None
    ) -> dict[str, Any] | None:
        """Move the file at ``path`` into the store; None if there is none.

        The id is a function of ``filename``, so adopting again after a crash finds the file that was moved before it.
        """
        file_id = f"file-{hashlib.blake2b(filename.encode(), digest_size=16).hexdigest()}"
        if path.exists():
            os.replace(path, self.path(file_id))
        if not self.path(file_id).exists():
            return None
        known = self.get(file_id, tenant)
        return known or self._describe(file_id, filename, purpose, tenant, expires_after_s)

    def get(self, file_id: str, tenant: str) -> dict[str, Any] | None:
        """Return the object of a tenant's file, or None if the file does not exist or has expired."""
        if _ID.fullmatch(file_id) is None:
            return None
        try:
            value: dict[str, Any] = msgspec.json.decode(self._meta(file_id).read_bytes())
        except FileNotFoundError:
            return None
        expires_at = value.get("expires_at")
        if value.pop("tenant", "") != tenant:
            return None
        if expires_at is not None and expires_at <= self._unix_time():
            self._delete(file_id)
            return None
        return value

    def path(self, file_id: str) -> Path:
        """Return the path of the bytes of a file."""
        assert _ID.fullmatch(file_id), file_id
        return self._folder / f"{file_id}.data"

    def all(self, tenant: str) -> list[dict[str, Any]]:
        """Return the objects of a tenant's files, the oldest first."""
        # Descriptions are written once, so their times are those of creation.
        paths = sorted(self._folder.glob("file-*.json"), key=lambda path: path.stat().st_mtime_ns)
        objects = [self.get(path.stem, tenant) for path in paths]
        return [value for value in objects if value is not None]

    def delete(self, file_id: str, tenant: str) -> bool:
        """Delete a tenant's file; return whether it existed."""
        if self.get(file_id, tenant) is None:
            return False
        return self._delete(file_id)

    def _delete(self, file_id: str) -> bool:
        self._meta(file_id).unlink()
        with contextlib.suppress(FileNotFoundError):
            self.path(file_id).unlink()
        return True

    def _check_room(self, num_new_bytes: int) -> None:
        with os.scandir(self._folder) as entries:
            sizes = [entry.stat().st_size for entry in entries if entry.name.endswith(".data")]
        if len(sizes) < MAX_FILES and sum(sizes) + num_new_bytes <= self._max_bytes:
            return
        text = (
            f"{len(sizes)} files of {sum(sizes)} bytes are stored, and this one has {num_new_bytes}: at most "
            f"{MAX_FILES} files of {self._max_bytes} bytes (--file-store-mib) may be. Delete files that are not needed."
        )
        raise HttpError(Refusal(507, text, code="file_store_full"))

    def _meta(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"

    def _describe(
        self, file_id: str, filename: str, purpose: str, tenant: str, expires_after_s: int | None
    ) -> dict[str, Any]:
        created_at = int(self._unix_time())
        value = {
            "id": file_id,
            "object": "file",
            "bytes": self.path(file_id).stat().st_size,
            "created_at": created_at,
            "expires_at": None if expires_after_s is None else created_at + expires_after_s,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        write_json(self._meta(file_id), {**value, "tenant": tenant})
        return value


FORM_BYTES = 65_536  # for everything in a form but its file


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

"""`FileStore`: the files that clients uploaded or that batches wrote, under ``--batch-dir``.

files/ID.json    the object of ``/v1/files/ID``; written last, so a file exists completely or not at all
files/ID.data    its bytes
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from quire.durable import Records, removed_on_failure
from quire.http.refusals import HttpError, Refusal
from quire.jobs.disk import MAX_STORE_BYTES
from quire.private import written_anew

MAX_FILES = 10_000
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
        self._objects = Records(self._folder, dict[str, Any], _ID)  # with the tenant of each
        self._new_id = new_id
        self._unix_time = unix_time
        # A server died while it wrote these. One that hands over to this server writes each in a moment.
        for left in self._folder.glob("*.tmp"):
            with suppress(FileNotFoundError):
                if unix_time() - left.stat().st_mtime > 60.0:
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
        value = self._objects.get(file_id)
        return value if value is not None and self._has(value, tenant) else None

    def _has(self, value: dict[str, Any], tenant: str) -> bool:
        """Whether a stored object, whose tenant is taken out, is this tenant's. One that has expired is deleted."""
        if value.pop("tenant", "") != tenant:
            return False
        expires_at = value.get("expires_at")
        if expires_at is None or expires_at > self._unix_time():
            return True
        self._delete(value["id"])
        return False

    def path(self, file_id: str) -> Path:
        """Return the path of the bytes of a file."""
        assert _ID.fullmatch(file_id), file_id
        return self._folder / f"{file_id}.data"

    def all(self, tenant: str) -> list[dict[str, Any]]:
        """Return the objects of a tenant's files, the oldest first."""
        # An object is written once, so the order of writing is that of creation.
        return [value for _, value in self._objects.all() if self._has(value, tenant)]

    def delete(self, file_id: str, tenant: str) -> bool:
        """Delete a tenant's file; return whether it existed."""
        if self.get(file_id, tenant) is None:
            return False
        return self._delete(file_id)

    def _delete(self, file_id: str) -> bool:
        self._objects.delete(file_id)
        self.path(file_id).unlink(missing_ok=True)
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
        self._objects.put(file_id, {**value, "tenant": tenant})
        return value

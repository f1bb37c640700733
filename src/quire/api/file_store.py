"""`FileStore`: uploaded and made files under ``--batch-dir``.

files/ID.json    what ``/v1/files/ID`` says; written last, so a file is there whole or not at all
files/ID.data    its bytes
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

_ID = re.compile(r"file-[0-9a-f]{32}")


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value``, whole or not at all, also when the power goes."""
    made = path.with_suffix(".tmp")
    with made.open("wb") as file:
        file.write(msgspec.json.encode(value))
        file.flush()
        os.fsync(file.fileno())
    os.replace(made, path)


class FileStore:
    """Files by id. Everything is read from disk: there are few, and a restart changes nothing."""

    def __init__(self, root: Path, new_id: Callable[[], str], unix_time: Callable[[], float]) -> None:
        self._folder = root / "files"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._new_id = new_id
        self._unix_time = unix_time
        for left in self._folder.glob("*.tmp"):  # of a server that died while it wrote
            left.unlink()

    def add(
        self, data: bytes, filename: str, purpose: str, expires_after_s: int | None = None
    ) -> dict[str, Any]:
        """Keep ``data`` and return its file object."""
        file_id = f"file-{self._new_id()}"
        self.path(file_id).write_bytes(data)
        return self._describe(file_id, filename, purpose, expires_after_s)

    def adopt(
        self, path: Path, filename: str, purpose: str, expires_after_s: int | None = None
    ) -> dict[str, Any] | None:
        """Take over the file at ``path``, which is moved; None where there is none.

        The id is a function of ``filename``: adopting again after a crash finds what was moved before it.
        """
        file_id = f"file-{hashlib.blake2b(filename.encode(), digest_size=16).hexdigest()}"
        if path.exists():
            os.replace(path, self.path(file_id))
        if not self.path(file_id).exists():
            return None
        return self.get(file_id) or self._describe(file_id, filename, purpose, expires_after_s)

    def get(self, file_id: str) -> dict[str, Any] | None:
        """Return the file object, or None where there is none (any more)."""
        if _ID.fullmatch(file_id) is None:
            return None
        try:
            value: dict[str, Any] = msgspec.json.decode(self._meta(file_id).read_bytes())
        except FileNotFoundError:
            return None
        expires_at = value.get("expires_at")
        if expires_at is not None and expires_at <= self._unix_time():
            self.delete(file_id)
            return None
        return value

    def path(self, file_id: str) -> Path:
        """Where the bytes of a known file are."""
        assert _ID.fullmatch(file_id), file_id
        return self._folder / f"{file_id}.data"

    def all(self) -> list[dict[str, Any]]:
        """Return every file object, the oldest first."""
        paths = sorted(
            self._folder.glob("file-*.json"), key=lambda path: path.stat().st_mtime_ns
        )  # written once
        found = [self.get(path.stem) for path in paths]
        return [value for value in found if value is not None]

    def delete(self, file_id: str) -> bool:
        """Forget a file; return whether it was there."""
        if _ID.fullmatch(file_id) is None or not self._meta(file_id).exists():
            return False
        self._meta(file_id).unlink()
        with contextlib.suppress(FileNotFoundError):
            self.path(file_id).unlink()
        return True

    def _meta(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.json"

    def _describe(
        self, file_id: str, filename: str, purpose: str, expires_after_s: int | None
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
        write_json(self._meta(file_id), value)
        return value

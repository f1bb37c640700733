"""`content_digest`: names a checkpoint by every byte of its weight files, wherever they lie.

A digest reads the whole file, so it is kept in a folder of the user's cache, by what the file system says of the file:
inode, size, and the times of the last change. A program cannot set the time of a file's last change (ctime).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.errors import ModelLoadError
from quire.metrics.log import Log
from quire.models.packed_file import packed_folder
from quire.private import private_folder, written_anew

log = Log("content")


def content_digest(files: Iterable[Path], folder: Path | None = None, *, piece_bytes: int = 32 << 20) -> str:
    """Return 32 hexadecimal digits of the bytes of ``files``; their names, order and places do not matter.

    ``folder``: where digests are kept; None: in the user's cache. Each thread reads ``piece_bytes`` at once.

    Raises:
        OSError: a file cannot be read.
        ModelLoadError: a file changes meanwhile.
    """
    if folder is None:
        with contextlib.suppress(OSError):
            folder = packed_folder().with_name("digests")
    digests = sorted(_file_digest(path.resolve(), folder, piece_bytes) for path in files)
    return hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest()


def _file_digest(path: Path, folder: Path | None, piece_bytes: int) -> str:
    name = hashlib.blake2b(os.fsencode(path), digest_size=16).hexdigest()
    note = None if folder is None else folder / f"{name}.json"
    facts = _facts(path)
    if note is not None and (digest := _kept(note, facts)) is not None:
        return digest
    digest = _computed(path, piece_bytes)
    if _facts(path) != facts:
        raise ModelLoadError(f"{path} changes while it is read: wait until it is written.")
    if note is not None:
        _keep(note, facts, digest)
    return digest


def _facts(path: Path) -> list[int]:
    """Return what changes when the file changes: device, inode, size, and the times of its last changes in ns."""
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _computed(path: Path, piece_bytes: int) -> str:
    """Return the digest of the digests of the file's pieces, which are computed side by side."""
    starts = range(0, max(1, path.stat().st_size), piece_bytes)
    with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1)) as pool:
        pieces = pool.map(lambda start: _piece(path, start, piece_bytes), starts)
        return hashlib.blake2b(b"".join(pieces), digest_size=32).hexdigest()


def _piece(path: Path, start: int, num_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.blake2b(file.read(num_bytes), digest_size=32).digest()


def _kept(note: Path, facts: list[int]) -> str | None:
    try:
        entry = json.loads(note.read_text())
        return str(entry["digest"]) if entry["facts"] == facts else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(note: Path, facts: list[int], digest: str) -> None:
    part = note.with_suffix(f".{os.getpid()}")
    try:
        private_folder(note.parent)
        with written_anew(part) as file:
            file.write(json.dumps({"facts": facts, "digest": digest}).encode())
        part.replace(note)
    except OSError as error:
        log.warning("digest_not_kept", file=str(note), error=error)

"""Files and folders that only this user may read: they hold prompts, answers, or the names of tenants.

What an older version made with other rights is tightened where it belongs to this user, and named in the log where not.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from quire.metrics.log import Log

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
log = Log("files")


def private_folder(folder: Path, *, is_ours: bool = True, files: str = "") -> None:
    """Make ``folder`` with mode 700, and tighten what an older version left there.

    ``is_ours`` False: a setting names the folder, so other files may be in it: if it is there, others' rights are only
    named. ``files``: a pattern of the files in it that are tightened.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    tighten(folder, changes=is_ours)
    for path in folder.glob(files) if files else ():
        if path.is_file() and not path.is_symlink():
            tighten(path)


def tighten(path: Path, *, changes: bool = True) -> None:
    """Take the rights of others from a file or a folder, if it is there; name them in the log where that may not be."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return
    if not mode & _OTHERS:
        return
    why = "a setting names it"
    if changes:
        try:
            path.chmod(mode & ~_OTHERS)
        except OSError as error:  # another user's, such as a mounted volume
            why = str(error.strerror)
        else:
            log.info("tightened", path=str(path), mode=f"{mode:o}")
            return
    log.warning("others_may_read", path=str(path), mode=f"{mode:o}", reason=why)


def private_fd(path: Path, flags: int) -> int:
    """Open a file, which gets mode 600 if it is made. Raises `OSError`."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def written_anew(path: Path) -> BinaryIO:
    """Open an empty file for bytes, whatever was there. Raises `OSError`."""
    tighten(path)
    return os.fdopen(private_fd(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb")


def appended(path: Path) -> BinaryIO:
    """Open a file behind its last byte, without a buffer. Raises `OSError`."""
    return os.fdopen(private_fd(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0)

"""The files of batches, and what happens while the disk is full."""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.args import ServerArgs, defaults
from quire.clock import RETRY_S
from quire.durable import Records
from quire.http.refusals import HttpError, Refusal
from quire.metrics.log import Log
from quire.private import appended
from quire.units import MIB

# States of a batch that has not ended.
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
MAX_STORE_BYTES = defaults(ServerArgs)["file_store_mib"] * MIB  # all files together
_ID = re.compile(r"batch_[0-9a-f]{32}")
log = Log("batch")


def is_full(error: OSError) -> bool:
    """Tell whether a write failed because the disk or the user's share of it is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def within_disk() -> Iterator[None]:
    """Answer 507 where the block finds the disk full.

    Raises:
        HttpError: nothing was kept of the request.
    """
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        log.error("disk_full", error=str(error))
        text = "The server's disk is full: nothing was stored. Delete files that are not needed, or try again later."
        raise HttpError(Refusal(507, text, code="disk_full")) from None


class BatchFolder:
    """The files of batches, in ``root/batches``. A line in one of the two .jsonl files is not run again.

    ID.json           the batch object: replaced at each change of its state
    ID.output.jsonl   answered lines, appended as they arrive
    ID.errors.jsonl   lines that were refused, failed or not run
    """

    def __init__(self, root: Path, unix_time: Callable[[], float]) -> None:
        self._folder = root / "batches"
        self._states = Records(self._folder, dict[str, Any], _ID)
        self._unix_time = unix_time

    def load(self) -> dict[str, dict[str, Any]]:
        """Return all batches by id."""
        return dict(self._states.all())

    def lines(self, batch: dict[str, Any], kind: str) -> Path:
        """Return the path of the lines of a batch; ``kind``: output or errors."""
        return self._folder / f"{batch['id']}.{kind}.jsonl"

    def append(self, batch: dict[str, Any], kind: str, line: bytes) -> None:
        """Add a line, or nothing of it where the disk is full."""
        with appended(self.lines(batch, kind)) as file:
            size = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(size)
                raise

    def set_status(self, batch: dict[str, Any], status: str) -> None:
        """Change the state of a batch, with its time, and save it."""
        changed = {"status": status, f"{status}_at": int(self._unix_time())}
        self.save({**batch, **changed})
        batch.update(changed)

    def save(self, batch: dict[str, Any]) -> None:
        self._states.put(batch["id"], batch)

    async def when_room(self, batch: dict[str, Any], write: Callable[[], None]) -> None:
        """Call ``write`` until the disk has room for it. The batch is paused meanwhile."""
        paused = False
        while True:
            try:
                write()
                break
            except OSError as error:
                if not is_full(error):
                    raise
                if not paused:
                    log.error("batch_paused", batch=batch["id"], error=str(error))
                paused = True
            await asyncio.sleep(RETRY_S)
        if paused:
            log.info("batch_continued", batch=batch["id"])

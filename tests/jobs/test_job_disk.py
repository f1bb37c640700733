"""The files of batches, and what happens while the disk is full."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from quire import durable
from quire.http.refusals import HttpError
from quire.jobs import disk
from quire.jobs.disk import BatchFolder, within_disk

ID = "batch_" + "0" * 32


def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_507_and_other_faults_are_not() -> None:
    with pytest.raises(HttpError) as raised, within_disk():
        full()
    assert (raised.value.refusal.status, raised.value.refusal.code) == (507, "disk_full")
    with pytest.raises(PermissionError), within_disk():
        raise PermissionError(errno.EACCES, "no")


def test_batches_are_read_back_and_strangers_left_alone(tmp_path: Path) -> None:
    folder = BatchFolder(tmp_path, lambda: 5.9)
    batch = {"id": ID, "status": "validating"}
    folder.set_status(batch, "in_progress")
    (tmp_path / "batches" / "notes.json").write_text("not of ours")
    assert batch["in_progress_at"] == 5
    assert BatchFolder(tmp_path, lambda: 0.0).load() == {ID: batch}


def test_a_state_that_is_not_saved_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = BatchFolder(tmp_path, lambda: 5.0)
    batch = {"id": ID, "status": "validating"}
    monkeypatch.setattr(durable, "write_json", lambda path, value: full())
    with pytest.raises(OSError, match="No space"):
        folder.set_status(batch, "in_progress")
    assert batch == {"id": ID, "status": "validating"}


def test_a_line_waits_for_room_and_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "RETRY_S", 0.0)
    folder = BatchFolder(tmp_path, lambda: 0.0)
    batch = {"id": ID}
    tries: list[int] = []

    def write() -> None:
        tries.append(1)
        if len(tries) < 4:
            full()
        folder.append(batch, "output", b"{}\n")

    asyncio.run(folder.when_room(batch, write))
    assert len(tries) == 4
    assert folder.lines(batch, "output").read_bytes() == b"{}\n"

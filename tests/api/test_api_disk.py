"""A disk that is full: uploads and batches are answered 507, no half file stays, and a running batch waits for room."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import openai
import pytest
from starlette.types import Receive, Scope, Send
from tests.api.asgi_client import Api, error_of
from tests.api.test_api_batches import CHAT, connected, jsonl, line, rows, wait
from tests.api.test_api_server import server

import quire.jobs.disk
import quire.jobs.files
from quire.http.call import Call
from quire.http.edge import new_id
from quire.jobs.disk import OPEN
from quire.jobs.files import FileStore
from quire.jobs.runner import BatchRunner


class Disk:
    """Fails the writes of the jobs while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.num_failures = 0
        real = quire.jobs.disk.os.fsync

        def fsync(fd: int) -> None:
            self.check()
            real(fd)

        copy = quire.jobs.files.shutil.copyfileobj

        def copyfileobj(source: Any, target: Any) -> None:
            target.write(source.read(10))  # half of it fits
            target.flush()
            self.check()
            source.seek(0)
            target.seek(0)
            copy(source, target)

        append = quire.jobs.disk.BatchFolder.append

        def append_some(folder: Any, batch: Any, kind: str, entry: bytes) -> None:
            self.check()
            append(folder, batch, kind, entry)

        monkeypatch.setattr(quire.jobs.disk.os, "fsync", fsync)
        monkeypatch.setattr(quire.jobs.files.shutil, "copyfileobj", copyfileobj)
        monkeypatch.setattr(quire.jobs.disk.BatchFolder, "append", append_some)

    def check(self) -> None:
        if self.full:
            self.num_failures += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def _lines(num: int) -> bytes:
    return jsonl(*(line(f"c{i}", max_tokens=2) for i in range(num)))


def test_a_full_disk_is_507_and_leaves_no_half_file(disk: Disk, tmp_path: Path) -> None:
    api = Api(batch_dir=str(tmp_path))

    def upload(data: bytes) -> httpx.Response:
        return api.call("POST", "/v1/files", files={"file": ("x", data)}, data={"purpose": "batch"})

    kept = upload(b"{}").json()
    before = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    disk.full = True
    asked = {"input_file_id": kept["id"], "endpoint": CHAT, "completion_window": "24h"}
    for answer in (upload(b"x" * 100_000), api.post("/v1/batches", asked)):
        error = error_of(answer, 507)
        assert error["code"] == "disk_full"
        assert error["message"].startswith("The server's disk is full: nothing was stored.")
    assert disk.num_failures == 2
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == before
    assert api.call("GET", "/v1/batches").json()["data"] == []
    disk.full = False
    assert upload(b"{}").status_code == 200


async def answer_all(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


@pytest.mark.parametrize("seed", range(6))
def test_a_batch_waits_for_room_and_goes_on(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """The disk is full at random moments, also while the batch begins and ends."""
    monkeypatch.setattr(quire.jobs.disk, "RETRY_S", 0.01)
    rng = Random(seed)

    async def go() -> dict[str, Any]:
        files = FileStore(tmp_path, new_id, time.time)
        made = files.add(io.BytesIO(_lines(12)), "lines", "batch", "")
        runner = BatchRunner(
            tmp_path, files, new_id=new_id, unix_time=time.time, is_busy=lambda: False, concurrency=3
        )
        runner.resume(answer_all)
        values = {"input_file_id": made["id"], "endpoint": CHAT, "output_expires_after_s": None}
        batch = runner.create(values, 600, Call())
        disk.full = True
        while batch["status"] in OPEN:
            await asyncio.sleep(0.005)
            disk.full = not disk.num_failures or rng.random() < 0.7
        await runner.close()
        assert batch["status"] == "completed", batch
        assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
        text = files.path(batch["output_file_id"]).read_text()
        return {row["custom_id"]: row for row in map(json.loads, text.splitlines())}

    assert set(asyncio.run(asyncio.wait_for(go(), 60))) == {f"c{i}" for i in range(12)}
    assert disk.num_failures


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, where this user may mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting is not allowed")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_really_full_disk_ends_nothing(small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    with server("0", "1", "", str(small_disk)) as (process, url), connected(url) as client:
        with pytest.raises(openai.APIStatusError) as raised:
            client.files.create(file=("b.jsonl", b"x" * 400_000), purpose="batch")
        assert raised.value.status_code == 507
        made = client.files.create(file=("l.jsonl", _lines(40)), purpose="batch")
        left = os.statvfs(small_disk)
        ballast.write_bytes(b"x" * (left.f_bavail * left.f_bsize - 12_288))
        started = client.batches.create(input_file_id=made.id, endpoint=CHAT, completion_window="24h")
        threading.Timer(1.5, ballast.unlink).start()
        ended = wait(client, started.id)
        assert (ended.status, ended.request_counts and ended.request_counts.completed) == ("completed", 40)
        assert len(rows(client, ended.output_file_id)) == 40
        process.terminate()
        assert process.stderr is not None
        assert "batch_paused" in (told := process.stderr.read())
        assert "Traceback" not in told


def test_what_a_dying_server_left_goes_and_what_another_writes_stays(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    old, new = folder / "file-a.tmp", folder / "file-b.tmp"
    for path, age_s in ((old, 120.0), (new, 0.5)):
        path.write_bytes(b"{")
        os.utime(path, times=(time.time() - age_s,) * 2)
    FileStore(tmp_path, new_id, time.time)
    assert [path.name for path in folder.iterdir()] == [new.name]

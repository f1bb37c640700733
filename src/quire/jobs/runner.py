"""`BatchRunner`: runs batches beside all other requests, and continues them after a restart.

A line runs when a slot is free (``concurrency`` for all batches together) and no other request waits; it has the lowest
priority. A line that is refused only for now (429 or 503: drain, full queue, dead engine) is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp

from quire.http.client import post_local
from quire.jobs.files import FileStore, write_json
from quire.jobs.lines import Line, LineError, check_lines, done_ids, output_line, read_lines, unanswered_line
from quire.metrics.log import Log

ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")
LOWEST_PRIORITY = 2**31 - 1  # smaller runs first
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_PAUSE_S = 0.05  # between checks of the load
_RETRY_S = 1.0  # before a line that was refused for now is tried again
_EXPIRED = "The batch expired before this request was run."
_ID = re.compile(r"batch_[0-9a-f]{32}")
log = Log("batch")


class BatchRunner:
    """Runs the lines of batches as calls of an application. ``is_busy`` tells whether other requests wait."""

    def __init__(
        self,
        root: Path,
        files: FileStore,
        *,
        new_id: Callable[[], str],
        unix_time: Callable[[], float],
        is_busy: Callable[[], bool],
        concurrency: int,
    ) -> None:
        self.files = files
        self._app: ASGIApp | None = None
        self._disk = BatchFolder(root, unix_time)
        self._new_id = new_id
        self._unix_time = unix_time
        self._is_busy = is_busy
        self._slots = asyncio.Semaphore(concurrency)
        self._batches = self._disk.load()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._done: dict[str, set[str]] = {}  # custom ids of the lines that have an answer

    def resume(self, app: ASGIApp) -> None:
        """Run batches as calls of ``app`` from now on, beginning with those that an earlier server left open."""
        self._app = app
        for batch in self.all():
            if batch["status"] in OPEN:
                log.info("batch_resumed", batch=batch["id"], status=batch["status"])
                self._start(batch)

    def create(self, values: dict[str, Any]) -> dict[str, Any]:
        """Begin a batch and return its object. ``values``: the fields that the client set."""
        batch_id = f"batch_{self._new_id()}"
        batch = {"id": batch_id, "object": "batch", **values, "created_s": self._unix_time()}
        batch["created_at"] = int(batch["created_s"])
        batch |= {"status": "validating", "errors": None, "output_file_id": None, "error_file_id": None}
        batch["request_counts"] = {"total": 0, "completed": 0, "failed": 0}
        self._batches[batch_id] = batch
        self._disk.save(batch)
        self._start(batch)
        return batch

    def get(self, batch_id: str) -> dict[str, Any] | None:
        return self._batches.get(batch_id)

    def all(self) -> list[dict[str, Any]]:
        """Every batch, the oldest first."""
        return sorted(self._batches.values(), key=lambda batch: batch["created_s"])

    def uses(self, file_id: str) -> bool:
        """Tell whether an open batch reads this file."""
        return any(b["input_file_id"] == file_id and b["status"] in OPEN for b in self._batches.values())

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """End an open batch: answers are kept, running requests are aborted."""
        batch = self._batches[batch_id]
        self._disk.set_status(batch, "cancelling")
        task = self._tasks.get(batch_id)
        if task is not None:
            task.cancel()
        return batch

    async def close(self) -> None:
        """Stop working; the next server continues from the state on disk."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, batch: dict[str, Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._tasks[batch["id"]] = task

    async def _run(self, batch: dict[str, Any]) -> None:
        batch_id = batch["id"]
        try:
            if batch["status"] == "validating" and not await self._validate(batch):
                return
            if batch["status"] == "in_progress":
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, batch["expires_at"] - self._unix_time())):
                        await self._run_lines(batch)
            self._finish(batch)
        except asyncio.CancelledError:
            if batch_id not in self._tasks:  # the server ends: the next one continues
                raise
            self._finish(batch)
        except Exception as error:  # one batch must not end the others
            log.exception("batch_failed", batch=batch_id)
            entry = LineError("internal", f"{type(error).__name__}: {error}")._asdict()
            batch["errors"] = {"object": "list", "data": [entry]}
            self._disk.set_status(batch, "failed")
        self._tasks.pop(batch_id, None)

    async def _validate(self, batch: dict[str, Any]) -> bool:
        path = self.files.path(batch["input_file_id"])
        total, errors = await asyncio.to_thread(check_lines, path, batch["endpoint"])
        batch["request_counts"]["total"] = total
        if errors:
            batch["errors"] = {"object": "list", "data": [error._asdict() for error in errors]}
        self._disk.set_status(batch, "failed" if errors else "in_progress")
        if errors:
            self._tasks.pop(batch["id"], None)
        return not errors

    async def _run_lines(self, batch: dict[str, Any]) -> None:
        """Answer every line that has no answer. Cancelling this call ends all running requests."""
        counts = batch["request_counts"]
        completed = await asyncio.to_thread(done_ids, self._disk.lines(batch, "output"))
        failed = await asyncio.to_thread(done_ids, self._disk.lines(batch, "errors"))
        counts["completed"], counts["failed"] = len(completed), len(failed)
        done = self._done[batch["id"]] = completed | failed
        async with asyncio.TaskGroup() as group:
            for line in read_lines(self.files.path(batch["input_file_id"])):
                if line.custom_id in done:
                    continue
                await self._slots.acquire()
                try:
                    while self._is_busy():
                        await asyncio.sleep(_PAUSE_S)
                except asyncio.CancelledError:
                    self._slots.release()
                    raise
                task = group.create_task(self._answer(batch, line))
                task.add_done_callback(lambda _: self._slots.release())

    async def _answer(self, batch: dict[str, Any], line: Line) -> None:
        """Run a line until it has an answer, and write the answer to disk."""
        assert self._app is not None
        request_id = self._new_id()
        while True:
            status, body = await post_local(
                self._app, batch["endpoint"], line.body, request_id=request_id, priority=LOWEST_PRIORITY
            )
            if status not in (429, 503):
                break
            await asyncio.sleep(_RETRY_S)
        kind = "output" if status == 200 else "errors"
        self._disk.append(batch, kind, output_line(request_id, line.custom_id, status, body))
        self._done[batch["id"]].add(line.custom_id)
        batch["request_counts"]["completed" if status == 200 else "failed"] += 1

    def _finish(self, batch: dict[str, Any]) -> None:
        """Write the lines without an answer, and publish the files. Repeating this after a crash is harmless."""
        batch_id, counts = batch["id"], batch["request_counts"]
        done = self._done.pop(batch_id, None)
        if done is None:
            done = done_ids(self._disk.lines(batch, "output")) | done_ids(self._disk.lines(batch, "errors"))
        how = "cancelled" if batch["status"] == "cancelling" else "completed"
        if batch["status"] == "in_progress" and len(done) < counts["total"]:
            how = "expired"
        if how != "completed" and counts["total"]:
            text = f"The batch was {how} before this request was run." if how == "cancelled" else _EXPIRED
            for line in read_lines(self.files.path(batch["input_file_id"])):
                if line.custom_id not in done:
                    entry = unanswered_line(self._new_id(), line.custom_id, f"batch_{how}", text)
                    self._disk.append(batch, "errors", entry)
                    counts["failed"] += 1
        elif how == "completed":
            self._disk.set_status(batch, "finalizing")
        for kind, field in (("output", "output_file_id"), ("errors", "error_file_id")):
            made = self.files.adopt(
                self._disk.lines(batch, kind),
                f"{batch_id}_{kind}.jsonl",
                "batch_output",
                batch["output_expires_after_s"],
            )
            batch[field] = None if made is None else made["id"]
        self._disk.set_status(batch, how)
        log.info("batch_ended", batch=batch_id, status=how, **counts)


class BatchFolder:
    """The files of batches, in ``root/batches``. A line in one of the two .jsonl files is not run again.

    ID.json           the batch object: replaced at each change of its state
    ID.output.jsonl   answered lines, appended as they arrive
    ID.errors.jsonl   lines that were refused, failed or not run
    """

    def __init__(self, root: Path, unix_time: Callable[[], float]) -> None:
        self._folder = root / "batches"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._unix_time = unix_time

    def load(self) -> dict[str, dict[str, Any]]:
        """Return all batches by id."""
        paths = [path for path in self._folder.glob("*.json") if _ID.fullmatch(path.stem)]
        return {path.stem: msgspec.json.decode(path.read_bytes()) for path in paths}

    def lines(self, batch: dict[str, Any], kind: str) -> Path:
        """Return the path of the lines of a batch; ``kind``: output or errors."""
        return self._folder / f"{batch['id']}.{kind}.jsonl"

    def append(self, batch: dict[str, Any], kind: str, line: bytes) -> None:
        with self.lines(batch, kind).open("ab") as file:
            file.write(line)

    def set_status(self, batch: dict[str, Any], status: str) -> None:
        """Change the state of a batch, with its time, and save it."""
        batch["status"] = status
        batch[f"{status}_at"] = int(self._unix_time())
        self.save(batch)

    def save(self, batch: dict[str, Any]) -> None:
        write_json(self._folder / f"{batch['id']}.json", batch)

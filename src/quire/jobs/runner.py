"""`BatchRunner`: runs batches beside all other requests, and continues them after a restart.

A line runs when a slot is free (``concurrency`` for all batches together) and no other request waits; it has the lowest
priority. A line that is refused only for now (429 or 503: drain, full queue, dead engine) is tried again. A batch that
finds the disk full is paused: it keeps what it has, and goes on once there is room.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from quire.clock import LOOK_S, RETRY_S
from quire.http.call import Call
from quire.http.client import post_local
from quire.http.keys import ApiKey
from quire.jobs.disk import OPEN, BatchFolder
from quire.jobs.files import FileStore
from quire.jobs.lines import Line, LineError, check_lines, done_ids, output_line, read_lines, unanswered_line
from quire.metrics.log import Log

LOWEST_PRIORITY = 2**31 - 1  # smaller runs first
_EXPIRED = "The batch expired before this request was run."
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
        # Another server may have changed them since this one began.
        self._batches = self._disk.load()
        for batch in self.all():
            if batch["status"] in OPEN:
                log.info("batch_resumed", batch=batch["id"], status=batch["status"])
                self._start(batch)

    def create(self, values: dict[str, Any], window_s: int, call: Call, num_lines: int = 0) -> dict[str, Any]:
        """Begin a batch that has ``window_s`` seconds, and return its object. ``values``: what the client set.

        ``call``: of the client; the batch's requests have its rights.

        ``num_lines``: those of its file, if they are checked; else they are counted before the first one is run.
        """
        batch_id = f"batch_{self._new_id()}"
        batch = {"id": batch_id, "object": "batch", **values, "created_s": self._unix_time()}
        batch |= owner_of(call)
        batch["created_at"] = int(batch["created_s"])
        batch["expires_at"] = batch["created_at"] + window_s
        batch |= {"status": "validating", "errors": None, "output_file_id": None, "error_file_id": None}
        batch["request_counts"] = {"total": num_lines, "completed": 0, "failed": 0}
        self._disk.save(batch)
        self._batches[batch_id] = batch
        self._start(batch)
        return batch

    def get(self, batch_id: str, tenant: str) -> dict[str, Any] | None:
        """Return a batch of the tenant."""
        batch = self._batches.get(batch_id)
        return batch if batch is not None and batch.get("tenant", "") == tenant else None

    def listed(self, tenant: str) -> list[dict[str, Any]]:
        """Return the batches of the tenant, the oldest first."""
        return [batch for batch in self.all() if batch.get("tenant", "") == tenant]

    def all(self) -> list[dict[str, Any]]:
        """Every batch, the oldest first."""
        return sorted(self._batches.values(), key=lambda batch: batch["created_s"])

    def uses(self, file_id: str) -> bool:
        """Tell whether an open batch reads this file."""
        return any(b["input_file_id"] == file_id and b["status"] in OPEN for b in self._batches.values())

    def check(self, file_id: str, endpoint: str) -> tuple[int, list[LineError]]:
        """Return the number of requests in a file and its errors; reads the whole file."""
        return check_lines(self.files.path(file_id), endpoint)

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
            await self._finish(batch)
        except asyncio.CancelledError:
            if batch_id not in self._tasks:  # the server ends: the next one continues
                raise
            await self._finish(batch)
        except Exception as error:  # one batch must not end the others
            log.exception("batch_failed", batch=batch_id)
            entry = LineError("internal", f"{type(error).__name__}: {error}")._asdict()
            batch["errors"] = {"object": "list", "data": [entry]}
            await self._disk.when_room(batch, lambda: self._disk.set_status(batch, "failed"))
        self._tasks.pop(batch_id, None)

    async def _validate(self, batch: dict[str, Any]) -> bool:
        path = self.files.path(batch["input_file_id"])
        total, errors = await asyncio.to_thread(check_lines, path, batch["endpoint"])
        batch["request_counts"]["total"] = total
        if errors:
            batch["errors"] = {"object": "list", "data": [error._asdict() for error in errors]}
        await self._disk.when_room(
            batch, lambda: self._disk.set_status(batch, "failed" if errors else "in_progress")
        )
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
                        await asyncio.sleep(LOOK_S)
                except asyncio.CancelledError:
                    self._slots.release()
                    raise
                task = group.create_task(self._answer(batch, line))
                task.add_done_callback(lambda _: self._slots.release())

    async def _answer(self, batch: dict[str, Any], line: Line) -> None:
        """Run a line until it has an answer, and write the answer to disk."""
        assert self._app is not None
        request_id = self._new_id()
        call = replace(call_for(batch), request_id=request_id, priority=LOWEST_PRIORITY)
        while True:
            status, body = await post_local(self._app, batch["endpoint"], line.body, call)
            if status not in (429, 503):
                break
            await asyncio.sleep(RETRY_S)
        kind = "output" if status == 200 else "errors"
        entry = output_line(request_id, line.custom_id, status, body)
        await self._disk.when_room(batch, lambda: self._disk.append(batch, kind, entry))
        self._done[batch["id"]].add(line.custom_id)
        batch["request_counts"]["completed" if status == 200 else "failed"] += 1

    async def _finish(self, batch: dict[str, Any]) -> None:
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
                    await self._disk.when_room(batch, partial(self._disk.append, batch, "errors", entry))
                    counts["failed"] += 1
        elif how == "completed":
            await self._disk.when_room(batch, lambda: self._disk.set_status(batch, "finalizing"))
        await self._disk.when_room(batch, lambda: _publish(self.files, self._disk, batch))
        await self._disk.when_room(batch, lambda: self._disk.set_status(batch, how))
        log.info("batch_ended", batch=batch_id, status=how, **counts)


def _publish(files: FileStore, disk: BatchFolder, batch: dict[str, Any]) -> None:
    """Move the files of answers into the store. A second call finds what the first one moved."""
    for kind, field in (("output", "output_file_id"), ("errors", "error_file_id")):
        made = files.adopt(
            disk.lines(batch, kind),
            f"{batch['id']}_{kind}.jsonl",
            "batch_output",
            batch.get("tenant", ""),
            batch["output_expires_after_s"],
        )
        batch[field] = None if made is None else made["id"]


def owner_of(call: Call) -> dict[str, Any]:
    """Return for whom a call runs as values of JSON, for `call_for` after a restart."""
    key = call.key
    rights = None if key is None else {"name": key.name, "models": list(key.models), "weight": key.weight}
    return {"tenant": call.tenant, "cache_group": call.cache_group, "key": rights}


def call_for(owner: Mapping[str, Any]) -> Call:
    """Return a call of this process for an owner, with the models that its key could use then."""
    tenant, rights = owner.get("tenant", ""), owner.get("key")
    call = Call(tenant=tenant, cache_group=owner.get("cache_group", ""), is_local=True)
    if rights is None:
        return call
    models, epoch = tuple(rights["models"]), datetime.fromtimestamp(0, UTC)
    key = ApiKey(rights["name"], tenant, "", epoch, models=models, weight=rights["weight"])
    return replace(call, key=key, weight=rights["weight"])

"""`BatchRunner`: runs batches beside all other requests, and continues them after a restart.

A line runs when a slot is free (``concurrency`` for all batches together) and no other request waits; it has the lowest
priority. A line that is refused only for now (429 or 503: drain, full queue, dead engine) is tried again. A batch that
finds the disk full is paused: it keeps what it has, and goes on once there is room.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.types import ASGIApp

from quire.http.call import Call
from quire.http.client import post_local
from quire.http.limits import BATCH_LINE_BYTES, BODY_VALUES, num_marks
from quire.jobs.disk import BatchFolder
from quire.jobs.files import FileStore
from quire.metrics.log import Log

MESSAGES = "/v1/messages"  # path of Anthropic's batches
ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")
LOWEST_PRIORITY = 2**31 - 1  # smaller runs first
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_PAUSE_S = 0.05  # between checks of the load
_RETRY_S = 1.0  # before a line that was refused for now is tried again
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
        batch |= call.owner()
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
        call = replace(Call.from_owner(batch), request_id=request_id, priority=LOWEST_PRIORITY)
        while True:
            status, body = await post_local(self._app, batch["endpoint"], line.body, call)
            if status not in (429, 503):
                break
            await asyncio.sleep(_RETRY_S)
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


MAX_LINES = 50_000  # OpenAI's
_MAX_ERRORS = 100  # shown of a failed batch
_REFUSED = {"stream": "A batch has whole answers.", "priority": "Batches have the lowest."}


class Line(NamedTuple):
    """One request of a batch."""

    custom_id: str
    body: bytes  # JSON


class LineError(NamedTuple):
    """Why a batch cannot run."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


def check_lines(path: Path, endpoint: str) -> tuple[int, list[LineError]]:
    """Return the number of requests in the file and its errors; without errors the batch can run."""
    errors: list[LineError] = []
    seen: set[str] = set()
    num_lines = 0
    for number, raw in _numbered(path):
        num_lines += 1
        error = _check(raw, number, endpoint, seen)
        if error is not None:
            errors.append(error)
            if len(errors) == _MAX_ERRORS:
                break
    if num_lines > MAX_LINES:
        errors.append(
            LineError("too_many_requests", f"{num_lines} requests; at most {MAX_LINES} are allowed.")
        )
    if not num_lines:
        errors.append(
            LineError("empty_file", "The input file has no requests: one JSON object per line is expected.")
        )
    return num_lines, errors


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the requests of a file in which `check_lines` found no error."""
    for _, raw in _numbered(path):
        value = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        yield Line(msgspec.json.decode(value["custom_id"]), bytes(value["body"]))


def done_ids(path: Path) -> set[str]:
    """Return the custom ids that were answered; an incomplete last line, left by a crash, is removed."""
    if not path.exists():
        return set()
    raw = path.read_bytes()
    complete = raw[: raw.rfind(b"\n") + 1]
    if len(complete) < len(raw):
        with path.open("r+b") as file:
            file.truncate(len(complete))
    return {msgspec.json.decode(line)["custom_id"] for line in complete.splitlines()}


def output_line(request_id: str, custom_id: str, status: int, body: bytes) -> bytes:
    """Return a line of the output file (status 200) or of the error file (any other)."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _encoded(request_id, custom_id, response, None)


def unanswered_line(request_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return a line of the error file for a request that was not run to its end."""
    return _encoded(request_id, custom_id, None, {"code": code, "message": message})


def _encoded(request_id: str, custom_id: str, response: Any, error: Any) -> bytes:
    value = {"id": "batch_req_" + request_id, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(value) + b"\n"


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not empty; nothing after a line that is too long."""
    with path.open("rb") as file:
        for number in itertools.count(1):
            raw = file.readline(BATCH_LINE_BYTES + 1)
            if raw.strip():
                yield number, raw
            if not raw or len(raw) > BATCH_LINE_BYTES:
                return


def _check(raw: bytes, number: int, endpoint: str, seen: set[str]) -> LineError | None:
    """Return the first error of a line, or None; ``seen`` are the custom ids of earlier lines."""

    def wrong(code: str, problem: str, param: str | None = None) -> LineError:
        return LineError(code, f"Line {number}{problem}", number, param)

    if len(raw) > BATCH_LINE_BYTES:
        return wrong(
            "line_too_large", f" has more than {BATCH_LINE_BYTES} bytes; at most so many are allowed."
        )
    if num_marks([raw]) > BODY_VALUES:
        return wrong("line_too_large", f" has more than {BODY_VALUES} values; at most so many are allowed.")
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return wrong("invalid_json_line", f" is not JSON: {error}.")
    if not isinstance(value, dict):
        return wrong("invalid_json_line", " is not an object.")
    custom_id, body = value.get("custom_id"), value.get("body")
    if not isinstance(custom_id, str) or not custom_id:
        return wrong("missing_required_parameter", " has no custom_id.", "custom_id")
    if custom_id in seen:
        return wrong("duplicate_custom_id", ": custom_id is used twice.", "custom_id")
    seen.add(custom_id)
    for name, allowed, code in (
        ("method", "POST", "invalid_method"),
        ("url", endpoint, "mismatched_endpoint"),
    ):
        if value.get(name) != allowed:
            return wrong(code, f": {name} = {str(value.get(name))[:80]!r} must be {allowed!r}.", name)
    if not isinstance(body, dict):
        return wrong("missing_required_parameter", " has no body.", "body")
    for name, why in _REFUSED.items():
        if body.get(name):
            return wrong("invalid_request", f": body.{name} is not allowed: {why}", "body." + name)
    for name in sorted(value.keys() - {"custom_id", "method", "url", "body"}):
        return wrong("unknown_parameter", f": unknown field {name[:80]!r}.", name[:80])
    return None

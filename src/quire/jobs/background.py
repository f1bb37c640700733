"""Background responses: ``/v1/responses`` with ``background: true`` runs on after its client has its id.

The application streams the response to this package, which answers the client with the first event and reads the other
events itself. Queries for the response go to the application, which also stores it at the end.

With a folder, the request of each response that runs is a file there, `ID.json`: after a restart it runs again, under
the same id and seed, so that it becomes the same response.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.clock import LOOK_S, RETRY_S
from quire.durable import Records
from quire.errors import CapacityError, clip
from quire.http.body import send_json
from quire.http.call import AnswerName, Call, call_of, put_call
from quire.http.client import post_local
from quire.http.events import first_data
from quire.http.json_page import json_response
from quire.jobs.disk import within_disk
from quire.metrics.log import Log
from quire.request import SEED_BITS

_ID = re.compile(r"[^.]+")
log = Log("background")
ROOT = "/v1/responses"


class _Record(msgspec.Struct):
    """A request whose response runs."""

    answer: str  # id, time and seed
    tenant: str
    weight: float
    body: str
    cache_group: str = ""

    @property
    def answer_id(self) -> str:
        return self.answer.partition(" ")[0]

    def call(self, request_id: str) -> Call:
        """Return what runs it again."""
        return Call(
            request_id, tenant=self.tenant, cache_group=self.cache_group, weight=self.weight, is_local=True,
            answer=AnswerName.read(self.answer),
        )  # fmt: skip


class BackgroundResponses:
    """Around the application of each route of responses; `cancel` and DELETE reach it once a running one has ended."""

    def __init__(
        self,
        max_body_bytes: int,
        new_id: Callable[[], str],
        unix_time: Callable[[], float],
        is_ready: Callable[[], bool],
        folder: Path | None = None,
    ) -> None:
        """``is_ready``: whether the application takes requests."""
        self._is_ready = is_ready
        self._max_body_bytes = max_body_bytes
        self._new_id = new_id
        self._unix_time = unix_time
        self._disk = None if folder is None else Records(folder, _Record, _ID)
        self._running: dict[tuple[str, str], _Run] = {}  # (tenant, id) → run
        self._records: dict[str, _Record] = {}  # answer id → record, of a running answer
        self._adopted: dict[str, _Record] = {}  # will run once there is an application
        self._starting: set[asyncio.Task[None]] = set()

    def adopt(self, records: list[Any]) -> None:
        """Take what `stop` returned in another server."""
        for record in msgspec.convert(records, list[_Record]):
            self._adopted[record.answer_id] = record

    def start(self, app: ASGIApp) -> None:
        """Run what was adopted, and what a server that ended has left in the folder."""
        left = () if self._disk is None else self._disk.all()
        self._adopted |= {answer_id: record for answer_id, record in left if answer_id not in self._records}
        for answer_id, record in self._adopted.items():
            task = asyncio.create_task(self._run_again(app, answer_id, record))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)
        self._adopted = {}

    async def stop(self) -> list[Any]:
        """End what runs as if it had never run, and return it."""
        records, self._records = self._records, {}
        tasks = [*self._starting, *(run.task for run in self._running.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [msgspec.to_builtins(record) for record in records.values()]

    async def _run_again(self, app: ASGIApp, answer_id: str, record: _Record) -> None:
        self._records[answer_id] = record
        while True:
            while not self._is_ready():
                await asyncio.sleep(LOOK_S)
            status, body = await post_local(app, ROOT, record.body.encode(), record.call(self._new_id()))
            if status not in (429, 503):
                break
            await asyncio.sleep(RETRY_S)
        if status != 200:
            log.error(
                "background_lost", id=answer_id, status=status, error=body[:500].decode("utf-8", "replace")
            )
            self._forget(answer_id)

    def _keep(self, record: _Record) -> None:
        """Have the request run again after a restart."""
        if self._disk is not None:
            with within_disk():
                self._disk.put(record.answer_id, record)
        self._records[record.answer_id] = record

    def _forget(self, answer_id: str) -> None:
        if self._records.pop(answer_id, None) is not None and self._disk is not None:
            self._disk.delete(answer_id)

    def around(self, app: ASGIApp) -> ASGIApp:
        """Return ``app``, the application of a route, with background responses."""

        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            answer = self._post if scope["path"] == ROOT else self._other
            await answer(app, scope, receive, send)

        return wrapped

    async def _post(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        messages, body = await _read(receive, self._max_body_bytes)
        if messages[-1]["type"] != "http.request" or not _in_background(body):
            await app(scope, _replayed(messages, receive), send)
            return
        call = call_of(scope)
        answer = call.answer or AnswerName(
            self._new_id(), int(self._unix_time()), secrets.randbits(SEED_BITS)
        )
        put_call(scope, replace(call, runs_in_background=True, answer=answer))
        record = _Record(str(answer), call.tenant, call.weight, body.decode(), call.cache_group)
        self._keep(record)
        run = _Run(app, scope, messages)
        try:
            has_begun = await run.begun(send)
        except asyncio.CancelledError:  # the server stops, or the client left before it had the id
            run.task.cancel()
            raise
        if not has_begun:
            if call.answer is None:  # else it runs again, and its record stays
                self._forget(answer.id)
            return
        response = run.response
        key = (call.tenant, response["id"])
        self._running[key] = run

        def ended(task: asyncio.Task[None]) -> None:
            self._running.pop(key, None)
            if not task.cancelled():
                self._forget(answer.id)

        run.task.add_done_callback(ended)
        await send_json(send, 200, msgspec.json.encode(response), run.headers)

    async def _other(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        response_id, _, action = scope["path"].removeprefix(ROOT + "/").partition("/")
        tenant = call_of(scope).tenant
        run = self._running.get((tenant, response_id))
        record = self._records.get(response_id.removeprefix("resp_"))
        if run is None and record is not None and record.tenant == tenant:
            text = f"The response {clip(response_id)} continues as soon as the model is loaded."
            raise CapacityError(text, retryable=True)
        deletes = scope["method"] == "DELETE" and not action
        if run is not None and (deletes or (scope["method"] == "POST" and action == "cancel")):
            await run.cancel()
            if deletes:  # the answer is the same if the application stores nothing
                await app(scope, receive, _dropped)
                deleted = {"id": response_id, "object": "response", "deleted": True}
                await json_response(deleted)(scope, receive, send)
                return
        await app(scope, receive, send)


class _Run:
    """A running response: a request to the application that lasts until its end or `cancel`."""

    def __init__(self, app: ASGIApp, scope: Scope, messages: list[Message]) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.response: dict[str, Any] = {}
        self._cancelled = asyncio.Event()
        self._sent: asyncio.Queue[Message] | None = asyncio.Queue()  # None: further messages are dropped
        self.task = asyncio.create_task(self._run(app, scope, messages))

    async def _run(self, app: ASGIApp, scope: Scope, messages: list[Message]) -> None:
        await app(scope, _replayed(messages, self._disconnect), self._send)

    async def begun(self, send: Send) -> bool:
        """Wait until the response has an id; an error is passed on to ``send`` instead."""
        assert self._sent is not None
        start, body = await self._sent.get(), await self._sent.get()
        if start["status"] == 200:
            self._sent = None
            self.headers = [pair for pair in start["headers"] if pair[0] == b"x-quire-ignored-fields"]
            self.response = first_data(body["body"])["response"]
            return True
        await send(start)
        await send(body)
        return False

    async def cancel(self) -> None:
        """End the response and wait until the application has stored it."""
        self._cancelled.set()
        await asyncio.wait([self.task])

    async def _disconnect(self) -> Message:
        await self._cancelled.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._sent is not None:
            self._sent.put_nowait(message)


async def _read(receive: Receive, max_bytes: int) -> tuple[list[Message], bytes]:
    """Return the messages of a body, and the body; the messages may be incomplete if the body is too long."""
    messages: list[Message] = []
    size = 0
    while size <= max_bytes:
        message = await receive()
        messages.append(message)
        size += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body", False):
            break
    return messages, b"".join([message.get("body", b"") for message in messages])


def _replayed(messages: list[Message], receive: Receive) -> Receive:
    waiting = iter(messages)

    async def replay() -> Message:
        message = next(waiting, None)
        return await receive() if message is None else message

    return replay


def _in_background(body: bytes) -> bool:
    """Whether the body asks for a background response. The application refuses a body that is not JSON."""
    if b'"background"' not in body:
        return False
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return isinstance(value, dict) and value.get("background") is True


async def _dropped(message: Message) -> None:
    return None

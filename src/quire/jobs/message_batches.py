"""Anthropic's ``/v1/messages/batches``: batches of messages, run by the same `BatchRunner` as OpenAI's.

The requests of a batch are kept as a file of lines, like an uploaded one; ``msgbatch_X`` is ``batch_X`` on disk.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from quire.errors import NotFoundError, RequestError, clip
from quire.http.body import read_bytes
from quire.http.call import call_of
from quire.http.json_page import json_response
from quire.http.wire import Ignored, Wire, not_allowed, parse
from quire.jobs.disk import OPEN, within_disk

if TYPE_CHECKING:  # loaded with `--batch-dir` alone
    from quire.jobs.runner import BatchRunner

MESSAGES = "/v1/messages"  # path of Anthropic's batches
_WINDOW_S = 24 * 3600
_PAGE = (20, 1000)  # batches in a list: by default, at most
_ENDS = {"batch_cancelled": "canceled", "batch_expired": "expired"}
_encode = msgspec.json.Encoder().encode


class MessageBatchRequest(Wire):
    """Body of ``POST /v1/messages/batches``."""

    requests: Annotated[
        list[Any], Field(description="a list of objects with custom_id and params", min_length=1)
    ]


# For the description of the API.
HELD = {
    "requests": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["custom_id", "params"],
            "properties": {
                "custom_id": {"type": "string", "minLength": 1},
                "params": {
                    "allOf": [
                        {"$ref": "#/components/schemas/MessagesRequest"},
                        {"properties": {"stream": {"const": False}, "priority": {"const": 0}}},
                    ]
                },
            },
        },
    }
}


class _Asked(msgspec.Struct):
    custom_id: str
    params: msgspec.Raw


class MessageBatches:
    """The handlers. ``runner`` raises where there is no folder for batches."""

    def __init__(
        self, runner: Callable[[], BatchRunner], max_bytes: int, ignored: Callable[[], Ignored]
    ) -> None:
        self._runner = runner
        self._max_bytes = max_bytes
        self._ignored = ignored

    def routes(self) -> list[Route]:
        root = MESSAGES + "/batches"
        return [
            Route(root, self.batches, methods=["GET", "POST"]),
            Route(root + "/{batch_id}", self.batch, methods=["GET"]),
            Route(root + "/{batch_id}/cancel", self.cancel, methods=["POST"]),
            Route(root + "/{batch_id}/results", self.results, methods=["GET"]),
        ]

    async def batches(self, request: Request) -> Response:
        """Begin a batch of messages (POST), or list the batches."""
        if request.method == "POST":
            with within_disk():
                return await self._create(request)
        listed = self._runner().listed(call_of(request.scope).tenant)
        shown = [self._shown(batch, request) for batch in listed if is_messages(batch)]
        return json_response(_page(shown[::-1], request))

    async def batch(self, request: Request) -> Response:
        """One batch of messages: its state and its counts."""
        return json_response(self._shown(self._batch(request), request))

    async def cancel(self, request: Request) -> Response:
        """End an open batch of messages; one that has ended stays as it is."""
        batch = self._batch(request)
        if batch["status"] in OPEN and batch["status"] != "cancelling":
            with within_disk():
                batch = self._runner().cancel(batch["id"])
        return json_response(self._shown(batch, request))

    async def results(self, request: Request) -> Response:
        """The results of a batch of messages that has ended, as JSON lines.

        Raises:
            NotFoundError: it has not ended.
        """
        batch = self._batch(request)
        if batch["status"] in OPEN:
            raise NotFoundError(
                f"{_shown_id(batch)} has no results yet: its processing_status is not ended.",
                param="batch_id",
            )
        lines = (_result(line) + b"\n" for line in self._lines(batch))
        return StreamingResponse(lines, media_type="application/x-jsonl")

    async def _create(self, request: Request) -> Response:
        runner, call = self._runner(), call_of(request.scope)
        raw = await read_bytes(request.scope, request.receive, self._max_bytes, "--max-body-mib")
        lines = await asyncio.to_thread(_to_lines, raw, self._ignored())
        source = await asyncio.to_thread(
            runner.files.add, io.BytesIO(lines), "requests.jsonl", "batch", call.tenant
        )
        num_lines, errors = await asyncio.to_thread(runner.check, source["id"], MESSAGES)
        if errors:
            runner.files.delete(source["id"], call.tenant)
            where = f"requests[{(errors[0].line or 1) - 1}]"
            text = errors[0].message.replace("body", "params").replace(f"Line {errors[0].line}", where, 1)
            raise RequestError(text, param=where)
        values = {"input_file_id": source["id"], "endpoint": MESSAGES, "completion_window": "24h"}
        batch = runner.create(
            {**values, "metadata": None, "output_expires_after_s": None}, _WINDOW_S, call, num_lines
        )
        return json_response(self._shown(batch, request))

    def _batch(self, request: Request) -> dict[str, Any]:
        batch_id = request.path_params["batch_id"]
        batch = self._runner().get(str(batch_id).removeprefix("msg"), call_of(request.scope).tenant)
        if batch is None or not is_messages(batch) or not batch_id.startswith("msg"):
            raise NotFoundError(f"There is no batch of messages {clip(batch_id)} here.", param="batch_id")
        return batch

    def _lines(self, batch: dict[str, Any]) -> Iterator[dict[str, msgspec.Raw]]:
        files = self._runner().files
        for name in ("output_file_id", "error_file_id"):
            if batch[name] is not None and files.get(batch[name], batch.get("tenant", "")) is not None:
                with files.path(batch[name]).open("rb") as file:
                    for line in file:
                        yield msgspec.json.decode(line, type=dict[str, msgspec.Raw])

    def _shown(self, batch: dict[str, Any], request: Request) -> dict[str, Any]:
        """Return the object that clients see; as with Anthropic, all requests are processed until the batch ends."""
        counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
        done, status = batch["request_counts"], batch["status"]
        has_ended = status not in OPEN
        if has_ended:
            counts |= {"succeeded": done["completed"], "errored": done["failed"]}
            how = {"cancelled": "canceled", "expired": "expired"}.get(status)
            if how is not None:
                counts[how] = sum(bytes(line["response"]) == b"null" for line in self._lines(batch))
                counts["errored"] -= counts[how]
        else:
            counts["processing"] = done["total"]
        ended = batch.get(f"{status}_at") if has_ended else None
        url = f"{request.base_url}{MESSAGES[1:]}/batches/{_shown_id(batch)}/results"
        return {
            "id": _shown_id(batch),
            "type": "message_batch",
            "processing_status": "ended"
            if has_ended
            else "canceling"
            if status == "cancelling"
            else "in_progress",
            "request_counts": counts,
            "created_at": _time(batch["created_at"]),
            "expires_at": _time(batch["expires_at"]),
            "ended_at": _time(ended),
            "cancel_initiated_at": _time(batch.get("cancelling_at")),
            "archived_at": None,
            "results_url": url if has_ended else None,
        }


def is_messages(batch: dict[str, Any]) -> bool:
    return bool(batch["endpoint"] == MESSAGES)


def _shown_id(batch: dict[str, Any]) -> str:
    return f"msg{batch['id']}"


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _to_lines(raw: bytes, ignored: Ignored) -> bytes:
    """Return the requests of a body as lines of a batch. The parameters of each stay as they are written.

    Raises:
        RequestError: names what is wrong.
    """
    try:
        body = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        requests = msgspec.json.decode(body.get("requests", b"[]"), type=list[_Asked])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        text = f"The body is not a batch: {error}. Send an object with requests, a list of {{custom_id, params}}."
        raise RequestError(text, param="requests") from None
    parse(MessageBatchRequest, {name: [0] * len(requests) for name in body}, ignored=ignored)
    about = {"method": "POST", "url": MESSAGES}
    return b"\n".join(
        [_encode({"custom_id": one.custom_id, **about, "body": one.params}) for one in requests]
    )


def _result(line: dict[str, msgspec.Raw]) -> bytes:
    """Return the result of a line of the output or of the error file."""
    response = msgspec.json.decode(line["response"], type=dict[str, msgspec.Raw] | None)
    result: dict[str, Any]
    if response is None:
        result = {"type": _ENDS.get(msgspec.json.decode(line["error"])["code"], "expired")}
    elif bytes(response["status_code"]) == b"200":
        result = {"type": "succeeded", "message": response["body"]}
    else:
        result = {"type": "errored", "error": response["body"]}
    return _encode({"custom_id": line["custom_id"], "result": result})


def _page(items: list[dict[str, Any]], request: Request) -> dict[str, Any]:
    """Return one page of ``items``, behind ``after_id`` or before ``before_id``."""
    query, ids = request.query_params, [item["id"] for item in items]
    limit = query.get("limit", str(_PAGE[0]))
    if not limit.isascii() or not limit.isdigit() or len(limit) > 9 or not 1 <= int(limit) <= _PAGE[1]:
        raise not_allowed("limit", limit, f"an integer in 1…{_PAGE[1]}")
    for name in ("after_id", "before_id"):
        cursor = query.get(name)
        if cursor is not None and cursor not in ids:
            raise RequestError(f"{name} = {clip(cursor)} is not an id of this list.", param=name)
    begin, end = query.get("after_id"), query.get("before_id")
    rest = items[ids.index(begin) + 1 if begin else 0 : ids.index(end) if end else None]
    num = int(limit)
    page = rest[-num:] if end and not begin else rest[:num]
    edges = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"data": page, "has_more": len(page) < len(rest), **edges}

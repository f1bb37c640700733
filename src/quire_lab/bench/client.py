"""One streaming request to an OpenAI-compatible server, timed chunk by chunk.

A request is sent once: a retry would hide what a user sees. Every failure has a kind, by which the summary counts it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from quire.args import defaults
from quire.errors import ConfigError
from quire.http.client_errors import connection_problem
from quire_lab.bench.args import ServeBenchArgs
from quire_lab.bench.summary import CANCELLED, ERROR, OK, RequestRecord, Timing
from quire_lab.workload.request import WorkloadRequest

READY_POLL_S = 0.2
PATHS = {"completions": "/completions", "chat": "/chat/completions"}
# Sent to servers that take them: a list of ids says how many tokens a chunk holds, so that a token is counted even
# where its text waits for the rest of a character.
OPTIONAL_FIELDS: Mapping[str, Any] = {
    "return_token_ids": True,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}


@dataclass(frozen=True, slots=True)
class Target:
    """The server under test."""

    url: str  # the API's, such as http://127.0.0.1:8000/v1
    model: str
    endpoint: str = "completions"  # or "chat"
    as_ids: bool = True  # prompts of completions are token ids; otherwise words
    api_key: str | None = None
    timeout_s: float = defaults(ServeBenchArgs)["timeout_s"]  # for one whole request
    optional: Mapping[str, Any] = field(default_factory=lambda: dict(OPTIONAL_FIELDS))
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def request_url(self) -> str:
        return self.url + PATHS[self.endpoint]

    def body(self, prompt: Any, num_output_tokens: int) -> dict[str, Any]:
        """Return the JSON of one request. ``prompt``: ids or text; for a chat the messages."""
        body: dict[str, Any] = {"model": self.model, "stream": True}
        body["messages" if self.endpoint == "chat" else "prompt"] = prompt
        body["max_tokens"] = num_output_tokens
        return body | dict(self.optional) | dict(self.extra_body)


def api_url(url: str) -> str:
    """Complete ``http://host:port`` to the URL of its API.

    Raises:
        ConfigError: it is not an http or https URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"--url {url!r} must be an http or https URL, such as http://127.0.0.1:8000")
    return url.rstrip("/") if parts.path.strip("/") else url.rstrip("/") + "/v1"


@dataclass(slots=True)
class Answer:
    """What has come of one request so far."""

    timing: Timing
    text: str = ""
    finished: bool = False  # a finish_reason came


class RequestFailed(Exception):
    """The request did not complete. Errors are counted by ``kind``."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind, self.detail = kind, detail


class _Cancelled(Exception):
    """The client leaves, as planned."""


class StreamingClient:
    """Sends requests over one pool of connections, which has no limit of its own."""

    def __init__(self, target: Target) -> None:
        self.target = target
        headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
            timeout=aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=min(30.0, target.timeout_s)),
            headers={"content-type": "application/json", **headers},
            auto_decompress=True,
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(
        self, request: WorkloadRequest, body: bytes, arrival_s: float, start_s: float
    ) -> tuple[RequestRecord, str]:
        """Send ``body`` and read the answer. Return the record, with times since ``start_s``, and the answer's text.

        ``arrival_s`` is the intended send time; it and ``start_s`` are times of `time.monotonic`.
        """
        answer = Answer(Timing(time.monotonic()))
        status, kind, detail = OK, None, None
        try:
            await self._stream(body, answer, request.cancel_after_tokens)
        except _Cancelled:
            status = CANCELLED
        except RequestFailed as failure:
            status, kind, detail = ERROR, failure.kind, failure.detail
        end_s = answer.timing.last_s if status != ERROR else time.monotonic()
        record = answer.timing.record(
            request,
            arrival_s=arrival_s,
            start_s=start_s,
            end_s=end_s,
            status=status,
            error=kind,
            detail=detail,
        )
        return record, answer.text

    async def probe(self, body: bytes) -> None:
        """Send one request and forget its times.

        Raises:
            RequestFailed: what the server or the connection said.
        """
        await self._stream(body, Answer(Timing(time.monotonic())), None)

    async def models(self) -> dict[str, int | None]:
        """Return the names of /models, each with its context in tokens where the server reports it (``max_model_len``).

        Raises:
            RequestFailed: the server cannot be reached, or has no such list.
        """
        try:
            async with self._session.get(self.target.url + "/models") as answer:
                value = json.loads(await answer.read())
                sizes = {str(model["id"]): model.get("max_model_len") for model in value["data"]}
                return {name: size if isinstance(size, int) else None for name, size in sizes.items()}
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RequestFailed("connection", f"the server {connection_problem(error)}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RequestFailed("no list of models", _reason(error)) from error

    async def _stream(self, body: bytes, answer: Answer, cancel_after: int | None) -> None:
        timing = answer.timing
        try:
            async with self._session.post(self.target.request_url, data=body) as response:
                if response.status != 200:
                    text = (await response.content.read(2000)).decode(errors="replace")
                    raise RequestFailed(f"http {response.status}", _message(text))
                async for now_s, data in _events(response.content):
                    _take(answer, now_s, data)
                    if cancel_after is not None and timing.num_output_tokens >= cancel_after:
                        response.close()  # not release: a client that leaves closes its connection
                        raise _Cancelled
        except TimeoutError as error:
            raise RequestFailed("timeout", f"after {self.target.timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise RequestFailed("connection refused", f"the server {connection_problem(error)}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise RequestFailed("connection broken", f"the server {connection_problem(error)}") from error
        if not answer.finished:
            raise RequestFailed("cut off", "the stream ended without a finish_reason")
        if timing.num_output_tokens == 0:
            raise RequestFailed("empty", "the answer has no token")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[float, bytes]]:
    """Yield (arrival time, data) of each server-sent event; an event in several pieces has the time of the last."""
    rest = b""
    async for piece in content.iter_any():
        now_s = time.monotonic()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now_s, line[5:].strip()


def _take(answer: Answer, now_s: float, data: bytes) -> None:
    """Count one event. The first token may come in any field: text, content, reasoning, a tool call."""
    if data == b"[DONE]":
        return
    try:
        event = json.loads(data)
    except ValueError:
        raise RequestFailed("not JSON", data[:200].decode(errors="replace")) from None
    if not isinstance(event, dict) or event.get("error"):
        raise RequestFailed("error event", _message(data.decode(errors="replace")))
    if event.get("usage"):
        _usage(answer.timing, event["usage"])
    for choice in event.get("choices") or ():
        ids, delta = choice.get("token_ids"), choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        content = text or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
        answer.text += text
        if num := len(ids) if ids is not None else int(bool(content)):
            answer.timing.tokens(now_s, num)
        answer.finished = answer.finished or choice.get("finish_reason") is not None


def _usage(timing: Timing, usage: Mapping[str, Any]) -> None:
    """Take the server's own counts: without ids, a chunk of several tokens was counted as one."""
    timing.num_prompt_tokens = usage.get("prompt_tokens", timing.num_prompt_tokens)
    if timing.first_s is not None:
        timing.num_output_tokens = max(timing.num_output_tokens, usage.get("completion_tokens") or 0)
    details = usage.get("prompt_tokens_details") or {}
    timing.num_cached_tokens = details.get("cached_tokens") or 0


def _message(text: str) -> str:
    """Return the message of an error body, or the body, on one line."""
    try:
        error = json.loads(text)
        error = error.get("error", error)
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, AttributeError):
        text = str(text)
    return " ".join(text.split())[:500]


def _reason(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


async def settle(target: Target, body_of: Any, ready_s: float = 0.0) -> Target:
    """Find out with one short request which fields the server takes; return the target without those that it refuses.

    ``body_of(target)`` makes the body. A field of `OPTIONAL_FIELDS` is dropped only if a refusal names it. A server
    that answers 503 is still loading: it is asked again for ``ready_s`` seconds.

    Raises:
        ConfigError: the server cannot be reached, or refuses the request for another reason.
    """
    give_up_s = time.monotonic() + ready_s
    while True:
        client = StreamingClient(target)
        try:
            await client.probe(body_of(target))
            return target
        except RequestFailed as failure:
            if failure.kind == "http 503" and time.monotonic() < give_up_s:
                await asyncio.sleep(READY_POLL_S)
                continue
            named = [name for name in target.optional if name in failure.detail]
            if not failure.kind.startswith("http 4") or not named:
                raise ConfigError(f"{target.request_url} cannot be measured: {failure}") from failure
            optional = {k: v for k, v in target.optional.items() if k not in named}
        finally:
            await client.close()
            await asyncio.sleep(0)
        target = replace(target, optional=optional)

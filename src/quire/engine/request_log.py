"""Requests with their output ids and latencies, as lines of JSON: what ``quire serve --compare-to`` runs again.

    {"about": {…}}                                     the first line: version, model, fingerprint, kernels …
    {"request": {…}, "samples": [{…}, …]}              one per request that has ended

An image is there as its digest and size, without pixels, so a request that has one cannot be run again.

`RequestLog` writes them for ``--record-requests``; a supervisor writes those in flight when an engine dies.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from quire.clock import Clock
from quire.engine.client import EngineClient
from quire.engine.guard import PREFIX
from quire.engine.messages import AbortRequest, FinishSample, Message
from quire.engine.recording_file import keep
from quire.errors import ConfigError
from quire.metrics.log import Log
from quire.private import private_fd, tighten
from quire.request import FinishReason, Request, TokenEvent
from quire.spans import without_pixels

MAX_BYTES = 2**30  # per file
log = Log("recorder")


@dataclass(slots=True)
class RecordedSample:
    """One sequence of a request. Seconds from the arrival of the request; None: there was no token, or no end."""

    token_ids: list[int] = field(default_factory=list)
    # "stop_string": the core was told. Otherwise the reason of its terminal event.
    finish_reason: str | None = None
    ttft_s: float | None = None
    e2el_s: float | None = None


@dataclass(slots=True)
class RecordedRequest:
    """A request as it arrived, and what it got."""

    request: Request
    samples: list[RecordedSample]

    @classmethod
    def of(cls, request: Request) -> RecordedRequest:
        """Begin the record of ``request``, which may have output ids from another engine."""
        outputs = request.output_token_ids or ((),) * request.sampling.num_samples
        spans = without_pixels(request.spans) if request.spans else ()
        arrived = replace(request, output_token_ids=(), finished_samples=(), spans=spans)
        return cls(arrived, [RecordedSample(list(ids)) for ids in outputs])

    @property
    def has_ended(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    def take(self, event: TokenEvent, now_s: float) -> None:
        """Note an event; those after the end of a sample count for nothing."""
        sample = self.samples[event.sample_index]
        if sample.finish_reason is not None:
            return
        if event.token_ids and sample.ttft_s is None:
            sample.ttft_s = now_s - self.request.arrival_s
        sample.token_ids += event.token_ids
        if event.finish_reason is not None:
            sample.finish_reason = str(event.finish_reason)
            sample.e2el_s = now_s - self.request.arrival_s

    def cut(self, sample_index: int, num_tokens: int, now_s: float) -> None:
        """A stop string was completed by output token ``num_tokens``."""
        sample = self.samples[sample_index]
        if sample.finish_reason is None:
            del sample.token_ids[num_tokens:]
            sample.finish_reason, sample.e2el_s = "stop_string", now_s - self.request.arrival_s


class RequestLog:
    """An `EngineClient` that writes down what goes through it."""

    def __init__(self, inner: EngineClient, path: Path, about: Mapping[str, str], clock: Clock) -> None:
        """``path`` is written anew.

        Raises:
            ConfigError: it cannot be written.
        """
        self._inner, self._clock = inner, clock
        self.wait_ready, self.replies, self.stats = inner.wait_ready, inner.replies, inner.stats
        self.health, self.dump = inner.health, inner.dump
        self._open: dict[str, RecordedRequest] = {}
        self._num_bytes = 0
        self._path = path
        try:
            tighten(path)
            handle = private_fd(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            self._file: BinaryIO | None = os.fdopen(handle, "wb", buffering=0)
        except OSError as error:
            text = f"--record-requests {path} cannot be written to: {error.strerror}"
            raise ConfigError(text) from error
        self._write([msgspec.json.encode({"about": about})])

    def send(self, message: Message) -> None:
        self._inner.send(message)
        match message:
            case Request() if not message.request_id.startswith(PREFIX):
                self._open[message.request_id] = RecordedRequest.of(message)
            case FinishSample(request_id, sample_index, num_output_tokens):
                recorded = self._open.get(request_id)
                if recorded is not None:
                    recorded.cut(sample_index, num_output_tokens, self._clock.now())
                    self._close_ended(request_id, recorded)
            case AbortRequest(request_id):
                recorded = self._open.pop(request_id, None)
                if recorded is not None and any(sample.token_ids for sample in recorded.samples):
                    self._write([msgspec.json.encode(recorded)])

    def receive(self, timeout_s: float | None = None) -> list[TokenEvent]:
        events = self._inner.receive(timeout_s)
        now_s = self._clock.now()
        for event in events:
            recorded = self._open.get(event.request_id)
            if recorded is not None:
                recorded.take(event, now_s)
                if event.finish_reason is not None:
                    self._close_ended(event.request_id, recorded)
        return events

    def close(self) -> None:
        self._inner.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _close_ended(self, request_id: str, recorded: RecordedRequest) -> None:
        if recorded.has_ended and self._open.pop(request_id, None) is not None:
            rejected = all(
                s.finish_reason == FinishReason.ERROR and not s.token_ids for s in recorded.samples
            )
            if not rejected:
                self._write([msgspec.json.encode(recorded)])

    def _write(self, lines: Iterable[bytes]) -> None:
        if self._file is None:
            return
        data = b"".join(line + b"\n" for line in lines)
        self._num_bytes += len(data)
        try:
            if self._num_bytes > MAX_BYTES:
                raise OSError(f"it has {MAX_BYTES} bytes")
            self._file.write(data)
        except OSError as error:
            log.error("request_log_ends", file=self._path, error=error)
            self._file.close()
            self._file = None


def keep_requests(folder: Path, requests: Iterable[Request], about: Mapping[str, str]) -> Path:
    """Write the requests that were in flight when an engine died, with the output ids that were delivered.

    Raises:
        OSError: the file cannot be written.
    """
    lines = [msgspec.json.encode({"about": about})]
    lines += [msgspec.json.encode(RecordedRequest.of(request)) for request in requests]
    return keep(folder, f"{os.getpid()}-death.jsonl", b"\n".join(lines) + b"\n", datetime.now(UTC))


def read_requests(path: Path) -> tuple[dict[str, str], list[RecordedRequest]]:
    """Read a file of requests: what it says of their engine, and the requests in order of arrival.

    Raises:
        ConfigError: it cannot be read, or a line is not of this form; a last line that was cut off is left out.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    about = _decode(path, 1, lines[0] if lines else b"", _Header).about
    requests = [
        _decode(path, number, line, RecordedRequest)
        for number, line in enumerate(lines[1:], 2)
        if line.endswith(b"\n")
    ]
    return about, sorted(requests, key=lambda recorded: recorded.request.arrival_s)


@dataclass(slots=True)
class _Header:
    about: dict[str, str]


_Line = TypeVar("_Line")


def _decode(path: Path, number: int, line: bytes, kind: type[_Line]) -> _Line:
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}, line {number} is no recorded request: {error}") from error

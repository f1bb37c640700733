"""The engine of the load test: answers every request with scripted tokens over the real wire, as fast as it is told.

A step gives one token to each open request, at most ``--tokens-per-s`` of them all together. Of every step it keeps
when its events were sent, and of every request its first step: from these the client tells how long a chunk was on its
way.

    python -m benchmarks.api_load.engine FD DIRECTORY CORE TOKENS_PER_S
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import zmq

from quire.engine.client import EngineInfo
from quire.engine.messages import AbortRequest, FinishSample
from quire.engine.process import Boot, Events, decode, encode
from quire.metrics.engine_stats import EngineStats
from quire.request import FinishReason, Request, TokenEvent

FIRST_TOKEN = 1000  # of the vocabulary: plain words
NUM_TOKENS = 997
MIN_STEP_S = 0.002  # a step of a large model takes longer; a busy loop would only starve the client beside it


class ScriptedEngine:
    """Open requests and the log of steps."""

    def __init__(self) -> None:
        self.open: dict[str, list[int]] = {}  # request id -> [tokens given, tokens to give]
        self.first_step: dict[str, int] = {}
        self.step_times: list[float] = []

    def take(self, message: Any) -> None:
        if isinstance(message, Request):
            request = message
            assert request.sampling.max_tokens is not None
            self.open[request.request_id] = [0, request.sampling.max_tokens]
            self.first_step[request.request_id.partition("/")[0]] = len(self.step_times)
        elif isinstance(message, AbortRequest | FinishSample):
            self.open.pop(message.request_id, None)

    def step(self) -> Events:
        events = []
        for request_id, progress in list(self.open.items()):
            progress[0] += 1
            last = progress[0] == progress[1]
            token_id = FIRST_TOKEN + (progress[0] * 31) % NUM_TOKENS
            reason = FinishReason.LENGTH if last else None
            events.append(TokenEvent(request_id, 0, (token_id,), finish_reason=reason))
            if last:
                del self.open[request_id]
        self.step_times.append(time.monotonic())
        return Events(events, [])


def main(life_fd: str, directory: str, core: str, tokens_per_s: str) -> None:
    os.sched_setaffinity(0, {int(core)})
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for place in (inbox, outbox):
        place.set_hwm(0)
    inbox.bind(f"ipc://{directory}/inbox.ipc")
    outbox.connect(f"ipc://{directory}/events.ipc")
    assert isinstance(decode(inbox.recv_multipart()), Boot)
    info = EngineInfo(
        num_kv_tokens=1 << 20, kv_bytes=0, weight_bytes=0, kernels="scripted", determinism="exact",
        load_s=0.0, pid=os.getpid(),
    )  # fmt: skip
    outbox.send_multipart(encode(info))
    outbox.send_multipart(encode(EngineStats()))
    engine = ScriptedEngine()
    poller = zmq.Poller()
    poller.register(inbox, zmq.POLLIN)
    poller.register(int(life_fd), zmq.POLLIN)
    due = time.monotonic()
    while True:
        wait_ms = 1000.0 if not engine.open else max(0.0, (due - time.monotonic()) * 1e3)
        ready = dict(poller.poll(wait_ms))
        if int(life_fd) in ready:
            break
        while inbox.poll(0):
            engine.take(decode(inbox.recv_multipart()))
        if engine.open and time.monotonic() >= due:
            step_s = max(MIN_STEP_S, len(engine.open) / float(tokens_per_s))
            due = max(due + step_s, time.monotonic() - step_s)
            outbox.send_multipart(encode(engine.step()))
    said = {"first_step": engine.first_step, "step_times": engine.step_times}
    Path(directory, "log.json").write_text(json.dumps(said))
    context.destroy(linger=0)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Fuzzed requests through the real engine: ``python -m tests.faults.real_engine [--requests 100000] [--seed 1]``.

The application of ``quire serve quill`` is called in this process; its engine is a process with the real model, behind
the real wire and supervisor. Thirty-two requests at a time. Wrong is: a 5xx, an exception, an event of an internal
error in a stream, a stream without its terminal event, a request that takes longer than a minute, and at the end a
restart, a request or a block that is left. Counted apart as refusals: 503 and 504 with one of the codes of `REFUSALS`,
which the server gives to requests that ask for a deadline, and to all while a limit of its queue is reached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import re
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from starlette.applications import Starlette
from tests.api.asgi_client import app_with_jobs
from tests.faults.junk import Asked, request_of
from tests.faults.report import table, write_section
from tests.lora.peft_files import make_adapters

from quire.args import EngineArgs
from quire.clock import WallClock
from quire.device import detect_device
from quire.engine.assemble import configure, load_text
from quire.engine.frontend import Frontend
from quire.engine.process import ProcessClient
from quire.engine.supervisor import Supervisor
from quire.models.checkpoint import describe
from quire.models.hub import locate

NUM_AT_ONCE = 32
LIMIT_S = 60.0
REFUSALS = ("queue_full", "deadline_hopeless", "deadline_exceeded", "ttft_too_long")
ENDS = (b"data: [DONE]\n\n", b"event: message_stop", b"event: response.completed", b"event: response.incomplete",
        b"event: response.failed", b"event: error", b'"error"')  # fmt: skip
INTERNAL = (b'"server_error"', b'"api_error"', b"engine_error")


class Answer:
    """What one call of the application sent."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.ended = False


async def call(app: Starlette, asked: Asked) -> Answer:
    """Send one request to the application; return the whole answer."""
    answer, sent = Answer(), False

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": asked.body, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert not answer.status, "two answers"
            answer.status, answer.headers = message["status"], dict(message["headers"])
        else:
            assert not answer.ended, "more after the end"
            answer.body += message.get("body", b"")
            answer.ended = not message.get("more_body", False)

    path, _, query = asked.path.partition("?")
    headers = [(b"host", b"test"), (b"content-length", str(len(asked.body)).encode())]
    headers += [(b"content-type", asked.media_type.encode("latin-1"))] if asked.media_type else []
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": asked.method, "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "headers": headers,
        "client": ("test", 1), "server": ("test", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    return answer


class Campaign:
    """Sends requests drawn from one seed and keeps count."""

    def __init__(self, app: Starlette, seed: int, num: int, until_s: float) -> None:
        self._app, self._rng, self._left, self._until_s = app, Random(seed), num, until_s
        self.statuses: Counter[int] = Counter()
        self.kinds: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.faults: list[str] = []
        self.num_events = 0

    async def run(self) -> None:
        await asyncio.gather(*(self._worker() for _ in range(NUM_AT_ONCE)))

    async def _worker(self) -> None:
        while self._left > 0 and time.monotonic() < self._until_s:
            self._left -= 1
            asked = request_of(self._rng)
            self.kinds[asked.kind] += 1
            said = f"{asked.method} {asked.path:.200} {asked.media_type:.80} {asked.body!r:.1500}"
            try:
                wrong = self._judge(asked, await asyncio.wait_for(call(self._app, asked), LIMIT_S))
            except Exception as error:
                wrong = "".join(traceback.format_exception(error))[-1500:]
            if wrong:
                self.faults.append(f"{wrong}: {said}")
                print("FAULT", self.faults[-1], flush=True)
            total = self.statuses.total()
            if total % 5000 == 0:
                print(f"{total} requests, {len(self.faults)} faults, {dict(self.statuses)}", flush=True)

    def _judge(self, asked: Asked, answer: Answer) -> str | None:
        """Return what is wrong with an answer, None if nothing is."""
        self.statuses[answer.status] += 1
        if not answer.ended:
            return "no end"
        if answer.status in (503, 504) and (code := _code_of(answer.body)) in REFUSALS:
            self.refusals[f"{answer.status} {code}"] += 1
            if answer.status == 503 and b"retry-after" not in answer.headers:
                return "503 without Retry-After"
            return None
        if answer.status >= 500 or answer.status < 200:
            return f"status {answer.status} {answer.body!r:.500}"
        if answer.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            self.num_events += answer.body.count(b"data: ")
            if not any(end in answer.body[-4000:] for end in ENDS):
                return f"a stream without its end: {answer.body[-300:]!r}"
        if (
            answer.status == 200
            and asked.path.startswith("/v1")
            and any(each in answer.body for each in INTERNAL)
        ):
            return f"an internal error in the answer: {answer.body[-500:]!r}"
        return None


def _code_of(body: bytes) -> str | None:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return None
    found = re.search("deadline|queue", error["message"])  # Anthropic's form has no code
    named = {"deadline": "deadline_hopeless", "queue": "queue_full"}
    return error.get("code") or (named[found[0]] if found else None)


async def campaign(num: int, seed: int, minutes: float, folder: Path) -> tuple[Campaign, str]:
    """Serve Quill, send ``num`` requests, wait until the engine is idle; return the counts and what was left over."""
    adapter = make_adapters(folder / "adapters", describe(locate("quill")).spec)[0]
    args = EngineArgs(
        threads=1, max_model_len=256, num_kv_blocks=2048, max_num_seqs=64, lora=(f"warm={adapter.path}",)
    )
    config, checkpoint = configure(args, detect_device())
    text = load_text(args, config, checkpoint)
    client = Supervisor(ProcessClient(config), lambda: ProcessClient(config), WallClock())
    frontend = Frontend(
        client, text.tokenizer, text.chat_template, text.model, WallClock(), adapters=text.adapters
    )
    app = app_with_jobs(frontend, batch_dir=str(folder / "batches"), max_file_bytes=10**6)
    await frontend.start()
    async with app.router.lifespan_context(app):
        done = Campaign(app, seed, num, time.monotonic() + 60 * minutes)
        await done.run()
        deadline_s = time.monotonic() + 60
        while (frontend.num_requests or client.stats().num_running) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.1)
        await call(
            app, Asked("", "POST", "/v1/completions", "application/json", b'{"prompt":"x","max_tokens":1}')
        )
        await asyncio.sleep(0.5)
        stats = client.stats()
        held = stats.num_blocks - stats.num_free_blocks - stats.num_idle_blocks
        left = f"{frontend.num_requests} requests, {held} blocks, {client.num_restarts} restarts"
    app.state.quire.bodies.close()
    await frontend.close()
    return done, left


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=100.0)
    parser.add_argument(
        "--report", action="store_true", help="write the counts to benchmarks/results/faults.md"
    )
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done, left = asyncio.run(campaign(args.requests, args.seed, args.minutes, Path(folder)))
    total = done.statuses.total()
    rows = [(str(status), f"{count:,}") for status, count in sorted(done.statuses.items())]
    text = (
        f"{total:,} requests, seed {args.seed}, {NUM_AT_ONCE} at a time, {time.monotonic() - begin_s:.0f} s: "
        f"{len(done.faults)} wrong (a 5xx but the refusals below, an exception, a stream without its end). "
        f"Left over: {left}.\n\n"
        f"{table(('status', 'answers'), rows)}\n\n"
        f"Refusals of requests that asked for a deadline, or of a full queue: {dict(done.refusals) or 'none'}. "
        f"Kinds of requests: {dict(done.kinds)}. Events in streams: {done.num_events:,}."
    )
    print(text)
    if args.report:
        write_section("Fuzzed requests through the real engine", "make fuzz-real", text)
    return 1 if done.faults or not left.startswith("0 requests, 0 blocks, 0") or total < args.requests else 0


if __name__ == "__main__":
    sys.exit(main())

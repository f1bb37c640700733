"""The load generator: sends a workload in an open or closed loop and returns one record per request.

    open loop     a request is due at its arrival time, whatever the server does
    closed loop   ``concurrency`` users; each sends its next request when its last one is answered

A thread keeps the time of an open loop: an event loop rounds its timers to milliseconds, and the delay would be counted
as the server's latency.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import msgspec

from quire.errors import ConfigError
from quire_lab.bench.client import StreamingClient, Target
from quire_lab.bench.summary import ERROR, RequestRecord
from quire_lab.workload.request import PromptMaker, WorkloadRequest

START_DELAY_S = 0.05  # start of the run to arrival 0; the pacer is ready by then
# Called with each request when it is sent, and later with its record.
Observe = Callable[[WorkloadRequest | RequestRecord], None]


@dataclass(frozen=True, slots=True)
class Load:
    """How to send a workload: at its arrival times, at most ``concurrency`` at once, or in a closed loop of as many."""

    concurrency: int | None = None
    closed: bool = False

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"--concurrency {self.concurrency} must be at least 1")
        if self.closed and self.concurrency is None:
            raise ConfigError("a closed loop needs --concurrency, the number of users")


class Runner:
    """Sends requests through one client. The turns of a session follow each other; all else is independent."""

    def __init__(
        self, client: StreamingClient, prompts: PromptMaker, load: Load, observe: Observe = lambda _: None
    ) -> None:
        self._client = client
        self._prompts = prompts
        self._load = load
        self._observe = observe
        self._slots = asyncio.Semaphore(load.concurrency or 2**31)
        self._records: dict[int, RequestRecord] = {}
        self._start_s = 0.0

    async def run(self, requests: Sequence[WorkloadRequest]) -> list[RequestRecord]:
        """Send all requests and wait for them; return their records in the order of ``requests``."""
        talks = [Conversation(self._client.target, self._prompts, turns) for turns in chained(requests)]
        for talk in talks:
            talk.prepare()
        self._start_s = time.monotonic() + START_DELAY_S
        await (self._closed(talks) if self._load.closed else self._open(talks))
        return [self._records[r.index] for r in requests]

    async def _open(self, talks: Sequence[Conversation]) -> None:
        due: asyncio.Queue[Conversation] = asyncio.Queue()
        pacer = Pacer([(self._start_s + talk.turns[0].arrival_s, talk) for talk in talks], due)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in talks:
                    talk = await due.get()
                    group.create_task(self._talk(talk, self._start_s + talk.turns[0].arrival_s))
        finally:
            pacer.stop()

    async def _closed(self, talks: Sequence[Conversation]) -> None:
        waiting = iter(talks)

        async def user() -> None:
            for talk in waiting:
                await self._talk(talk, time.monotonic())

        await asyncio.sleep(START_DELAY_S)
        async with asyncio.TaskGroup() as group:
            for _ in range(self._load.concurrency or 1):
                group.create_task(user())

    async def _talk(self, talk: Conversation, arrival_s: float) -> None:
        """Send each turn once the previous one is answered, the user has thought, and its arrival time has come."""
        for place, request in enumerate(talk.turns):
            if place > 0:
                arrival_s += request.think_s
                if not self._load.closed:
                    arrival_s = max(arrival_s, self._start_s + request.arrival_s)
                await asyncio.sleep(arrival_s - time.monotonic())
            async with self._slots:
                self._observe(request)
                record, text = await self._client.send(request, talk.body(place), arrival_s, self._start_s)
            self._finish(record)
            if record.status == ERROR:
                self._give_up(talk.turns[place + 1 :], record)
                return
            talk.answered(text)
            arrival_s = self._start_s + record.end_s

    def _give_up(self, rest: Sequence[WorkloadRequest], last: RequestRecord) -> None:
        """Count the later turns of a broken session as failed: they were due and could not be sent."""
        for request in rest:
            self._observe(request)
            self._finish(RequestRecord.not_sent(request, last.end_s, last.error))

    def _finish(self, record: RequestRecord) -> None:
        self._records[record.index] = record
        self._observe(record)


class Pacer:
    """A thread that puts each item into ``queue`` of the running loop at its time (`time.monotonic`)."""

    def __init__(
        self, items: Sequence[tuple[float, Conversation]], queue: asyncio.Queue[Conversation]
    ) -> None:
        self._items = sorted(items, key=lambda item: item[0])
        self._queue = queue
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pacer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, with or without items left."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        for due_s, item in self._items:
            while (wait_s := due_s - time.monotonic()) > 0.0:
                if self._stopped.wait(wait_s):
                    return
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)


_encode = msgspec.json.Encoder().encode


class Conversation:
    """The turns of a session, or a single request, as JSON bodies.

    Token ids (completions) are exact in length, and a later turn holds a made-up answer to the previous turn. Text
    (chats, and traces that bring their own) holds what the server actually answered.
    """

    def __init__(self, target: Target, prompts: PromptMaker, turns: Sequence[WorkloadRequest]) -> None:
        self.turns = turns
        self.as_ids = (
            target.as_ids and target.endpoint == "completions" and all(t.text is None for t in turns)
        )
        self._target = target
        self._prompts = prompts
        self._said: list[str] = []  # user and model in turns
        self._bodies: dict[int, bytes] = {}

    def prepare(self) -> None:
        """Make the bodies that do not depend on answers: making long prompts during the run would delay requests."""
        for place in range(len(self.turns) if self.as_ids else 1):
            self._bodies[place] = self._make(place)

    def body(self, place: int) -> bytes:
        """Return the body of turn ``place``; the turns before it are answered."""
        return self._bodies.pop(place, None) or self._make(place)

    def answered(self, text: str) -> None:
        """Take the model's answer to the last turn."""
        self._said.append(text)

    def _make(self, place: int) -> bytes:
        turn = self.turns[place]
        prompt: object
        if self.as_ids:
            prompt = self._prompts.token_ids(turn)
        else:
            del self._said[2 * place :]
            self._said.append(self._user_text(place))
            if self._target.endpoint == "chat":
                roles = ("user", "assistant")
                prompt = [{"role": roles[i % 2], "content": text} for i, text in enumerate(self._said)]
            else:
                prompt = "\n".join(self._said)
        return _encode(self._target.body(prompt, turn.num_output_tokens))

    def _user_text(self, place: int) -> str:
        turn = self.turns[place]
        if turn.text is not None:
            return turn.text
        return self._prompts.text(turn, start=self.turns[place - 1].num_tokens if place else 0)


def chained(requests: Sequence[WorkloadRequest]) -> list[list[WorkloadRequest]]:
    """Return the sessions by first arrival, each with its turns in order; a request without a session is its own."""
    chains: dict[Hashable, list[WorkloadRequest]] = {}
    for request in requests:
        key = request.index if request.session is None else (request.session,)
        chains.setdefault(key, []).append(request)
    for turns in chains.values():
        turns.sort(key=lambda r: r.turn)
    return list(chains.values())

"""The time that rejected clients are told, over the real admission of API and scheduler, on a scripted clock."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest

from quire.api.full_queue import FullQueue
from quire.config import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.engine.messages import CoreCall, Reply
from quire.executor.timed import Taken, TimedExecutor
from quire.http.call import Call
from quire.http.refusals import HttpError, busy
from quire.request import FinishReason, Request, SamplingParams, TokenEvent
from quire.scheduler.scheduler import Scheduler

SEATS, STEP_S, TOKEN_S = 16, 0.010, 0.0001
OUTPUT = range(20, 120)
PER_S = 16.4  # sustained with a long queue


class ScriptedLoop(asyncio.SelectorEventLoop):
    """An event loop in which waiting takes no time."""

    def __init__(self) -> None:
        super().__init__(_Selector(self))
        self.now_s = 1000.0

    def time(self) -> float:
        return self.now_s


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: ScriptedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "the script waits for nothing"
        self._loop.now_s += timeout
        return super().select(0)


@dataclass(slots=True)
class Sent:
    """One request; times are seconds of the run."""

    sent_s: float
    told_s: float = 0.0  # 0: it was admitted
    first_s: float = 0.0
    end_s: float = 0.0


class Server:
    """Clients, `FullQueue`, and an `EngineCore` whose steps take a scripted time."""

    def __init__(self, loop: ScriptedLoop, seed: int, **config: Any) -> None:
        self.loop, self.rng = loop, Random(seed)
        cache = CacheConfig(num_blocks=4096, block_size=16, enable_prefix_caching=False)
        self.step_end_s = 0.0
        executor = TimedExecutor(self._step_s, self, wait=lambda left_s: None, on_submit=self._submitted)
        limits = {"max_num_seqs": SEATS, "max_num_batched_tokens": 256, "max_model_len": 512}
        self.core = EngineCore(Scheduler(SchedulerConfig(**{**limits, **config}), cache), executor, self)
        self.queue = FullQueue(self.call, self.now)
        self.streams: dict[str, asyncio.Queue[TokenEvent]] = {}
        self.replies: dict[str, asyncio.Future[Reply]] = {}
        self.ids = itertools.count()
        self.num_full = 0  # requests that the engine got in full

    def now(self) -> float:
        return self.loop.now_s

    def _step_s(self, taken: Taken) -> float:
        return (STEP_S + TOKEN_S * taken.step.num_tokens) * self.rng.uniform(0.8, 1.3)

    def _submitted(self, end_s: float) -> None:
        self.step_end_s = end_s

    async def call(self, make: Any) -> Reply:
        call: CoreCall = make(str(next(self.ids)))
        self.replies[call.call_id] = reply = self.loop.create_future()
        self.core.put(call)
        return await reply

    async def run_engine(self) -> None:
        while True:
            self._deliver(self.core.begin())
            if self.core.out:
                await asyncio.sleep(self.step_end_s - self.now())
                self._deliver(self.core.finish())
            else:
                await asyncio.sleep(0.001)

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.streams[event.request_id].put_nowait(event)
        for reply in self.core.replies:
            self.replies.pop(reply.call_id).set_result(reply)
        self.core.replies.clear()

    async def request(self, body: bytes, prompt: tuple[int, ...], most: int) -> Sent:
        sent = Sent(self.now())
        call = self.queue.read(Call(), [body])
        try:
            if self.queue.refusal() is not None:
                raise HttpError(self.queue.refusal())  # type: ignore[arg-type]
            await self.queue.check(call)
        except HttpError as error:
            sent.told_s = float(dict(error.refusal.headers)[b"retry-after"])
            return sent
        self.num_full += 1
        name = str(next(self.ids))
        self.streams[name] = events = asyncio.Queue()
        self.queue.tokenized(call, len(prompt))
        sampling = SamplingParams(max_tokens=most, seed=0)
        self.core.put(Request(name, prompt, sampling, self.now(), place=call.body_key))
        while True:
            event = await events.get()
            if event.finish_reason is FinishReason.ERROR:
                assert event.error_kind == "capacity"
                sent.told_s = event.retry_after_s
                self.queue.rejected(call, busy(event.error or "", "queue_full", 1), sent.told_s)
                return sent
            sent.first_s = sent.first_s or self.now()
            if event.finish_reason is not None:
                sent.end_s = self.now()
                return sent

    async def load(self, rate: float, seconds: float, *, returns: bool) -> tuple[list[Sent], list[Sent]]:
        """Requests at a Poisson rate; return them, and those of clients that came back once."""
        first: list[Sent] = []
        back: list[Sent] = []

        async def client() -> None:
            prompt = tuple(self.rng.randrange(500) for _ in range(self.rng.randrange(20, 120)))
            body, most = repr(prompt).encode(), self.rng.choice(OUTPUT)
            first.append(await self.request(body, prompt, most))
            if returns and first[-1].told_s:
                await asyncio.sleep(first[-1].told_s + self.rng.uniform(0.0, 0.5))
                back.append(await self.request(body, prompt, most))

        async with asyncio.TaskGroup() as group:
            end_s = self.now() + seconds
            while self.now() < end_s:
                await asyncio.sleep(self.rng.expovariate(rate))
                group.create_task(client())
        return first, back


def scripted(seed: int, run: Any, **config: Any) -> Any:
    """Return what ``run(server)`` returns, on a clock of its own."""
    loop = ScriptedLoop()

    async def main() -> Any:
        server = Server(loop, seed, **config)
        tasks = [asyncio.create_task(server.run_engine()), asyncio.create_task(run(server))]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return done.pop().result()

    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


def p99(sent: list[Sent]) -> float:
    return float(np.percentile([each.first_s - each.sent_s for each in sent if each.end_s], 99))


def goodput(sent: list[Sent], begin_s: float, seconds: float) -> float:
    """Requests that ended in the window of a run whose first second fills the seats, per second."""
    return sum(begin_s + 1.0 < each.end_s <= begin_s + seconds for each in sent) / (seconds - 1.0)


async def below(server: Server, seconds: float = 6.0) -> tuple[float, float]:
    """p99 TTFT and goodput at 0.9 of the sustainable rate."""
    begin_s = server.now()
    sent, back = await server.load(0.9 * PER_S, seconds, returns=True)
    return p99(sent + back), goodput(sent + back, begin_s, seconds)


@pytest.mark.parametrize(("times", "seed"), [(3, 1), (6, 2)])
def test_clients_that_come_when_told_are_served(times: int, seed: int) -> None:
    """Far more are rejected per second than the engine could look at in full."""
    limit_s = 1.5 * scripted(seed, below)[0]
    seconds = 24.0 / times

    async def overload(server: Server) -> None:
        least_s, _ = await below(server)
        begin_s = server.now()
        sent, back = await server.load(times * PER_S, seconds, returns=True)
        share = sum(not each.told_s for each in back) / len(back)
        ratio, good = p99(sent + back) / least_s, goodput(sent + back, begin_s, seconds)
        print(
            f"{times} ×: {len(back)} came back, {share:.0%} served; p99 TTFT {ratio:.2f} ×; {good:.1f} per s"
        )
        assert len(back) >= 0.5 * (times - 1) * PER_S * seconds
        assert share >= 0.8
        assert ratio <= 2.0
        assert good >= 0.9 * PER_S
        assert server.num_full < 0.8 * (len(sent) + len(back)), "the others only asked"

    scripted(seed, overload, max_ttft_s=limit_s)


def test_requests_of_a_burst_share_a_message() -> None:
    async def burst(server: Server) -> None:
        await below(server, 2.0)
        bodies = [b"%d" % i for i in range(1000)]
        await server.request(b"fills", (1,) * 50, 100)
        server.queue.rejected(Call(), busy("full", "queue_full", 1), 1.0)
        before, full = next(server.ids), server.num_full
        sent = await asyncio.gather(*(server.request(body, (1,) * 50, 100) for body in bodies))
        admitted = [each for each in sent if not each.told_s]
        print(f"{len(admitted)} admitted, {server.num_full - full} in full")
        assert next(server.ids) - before - (server.num_full - full) <= 10, "messages"
        assert SEATS <= len(admitted) <= 3 * SEATS
        told = [each.told_s for each in sent if each.told_s]
        assert min(told) < 10 < 40 < max(told) < 2 * len(told) / PER_S, "the line is told as long as it is"

    scripted(3, burst, max_queue=16)


def test_an_engine_that_answers_nothing_is_not_waited_for() -> None:
    async def hang(server: Server) -> None:
        async def call(make: Any) -> Reply:
            await asyncio.sleep(3600)
            raise AssertionError

        queue = FullQueue(call, server.now)
        queue.rejected(Call(), busy("full", "queue_full", 1), 1.0)
        begin_s = server.now()
        others = FullQueue.read(Call(), [b"others"])
        checks = [asyncio.create_task(queue.check(others)) for _ in range(queue.MOST_ASKED)]
        await asyncio.sleep(0.1)
        assert queue.refusal() is not None, "further ones are refused unread"
        await asyncio.gather(*checks)  # each goes to the engine in full, which knows its deadline
        assert server.now() - begin_s < 3.0
        assert queue.refusal() is None

    scripted(4, hang)

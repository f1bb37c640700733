"""While the engine rejects requests, further ones are refused cheaply, and the engine still has work."""

from __future__ import annotations

import asyncio
import itertools
import selectors
import time
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from tests.api.asgi_client import Api, error_of
from tests.api.raw_asgi import RawCall

from quire.api.busy import PER_WINDOW, WINDOW_S, Busy
from quire.clock import RETRY_S
from quire.config import CacheConfig, SchedulerConfig
from quire.engine.core import EngineCore
from quire.executor.timed import Taken, TimedExecutor
from quire.http.refusals import busy
from quire.request import FinishReason, Request, SamplingParams, TokenEvent
from quire.scheduler.scheduler import Scheduler

BUSY = busy("The queue is full. Try again in 7 s.", "queue_full", 7)
SEATS, STEP_S, TOKEN_S = 16, 0.010, 0.0001
OUTPUT = range(20, 120)
PER_S = 16.4  # sustained with a long queue


def full(api: Api) -> None:
    """Make the API believe that the engine's queue is full, and that this window's requests have passed."""
    state = api.app.state.quire
    state.busy.rejected(BUSY, state.now())
    for _ in range(PER_WINDOW):
        state.busy.refusal(state.now())


def test_refusal_is_the_engines_with_its_retry_after() -> None:
    api = Api()
    full(api)
    answer = api.complete()
    assert error_of(answer, 503)["code"] == "queue_full"
    assert answer.headers["retry-after"] == "7"
    assert api.post("/tokenize", {"prompt": "hi"}).status_code == 200  # needs no engine
    assert not api.frontend.submitted


def test_refusing_costs_little() -> None:
    """CPU time of the whole application, per request; in full it is that of parsing, tokenizing and a round trip."""
    api = Api()
    state = api.app.state.quire

    async def go() -> float:
        best_s = 1.0
        for _ in range(5):
            start_s = time.thread_time()
            refused = 0
            for _ in range(4):
                state.busy.rejected(BUSY, state.now())
                calls: list[Any] = [
                    RawCall(api.app, "/v1/completions", {"prompt": "x" * 1000}) for _ in range(50)
                ]
                for _ in range(PER_WINDOW):
                    state.busy.refusal(state.now())
                await asyncio.gather(*(call.task for call in calls))
                refused += sum(call.sent[0]["status"] == 503 for call in calls)
            best_s = min(best_s, (time.thread_time() - start_s) / max(1, refused))
            assert refused >= 100
        return best_s

    assert asyncio.run(go()) < 0.001  # 0.1 ms here; other tests may load the machine


def test_some_of_each_window_go_to_the_engine() -> None:
    state = Busy()
    state.rejected(BUSY, 100.0)
    for window in range(3):
        now_s = 100.0 + window * 1.01 * WINDOW_S
        passed = [state.refusal(now_s) is None for _ in range(100)]
        assert passed == [True] * PER_WINDOW + [False] * (100 - PER_WINDOW)
    assert state.until_s == 100.0 + RETRY_S


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
    """Clients, `Busy`, and an `EngineCore` whose steps take a scripted time."""

    def __init__(self, loop: ScriptedLoop, seed: int, **config: Any) -> None:
        self.loop, self.rng = loop, Random(seed)
        cache = CacheConfig(num_blocks=4096, block_size=16, enable_prefix_caching=False)
        self.step_end_s = 0.0
        executor = TimedExecutor(self._step_s, self, wait=lambda left_s: None, on_submit=self._submitted)
        limits = {"max_num_seqs": SEATS, "max_num_batched_tokens": 256, "max_model_len": 512}
        self.core = EngineCore(Scheduler(SchedulerConfig(**{**limits, **config}), cache), executor, self)
        self.busy = Busy()
        self.streams: dict[str, asyncio.Queue[TokenEvent]] = {}
        self.ids = itertools.count()
        self.num_full = 0  # requests that the engine got in full

    def now(self) -> float:
        return self.loop.now_s

    def _step_s(self, taken: Taken) -> float:
        return (STEP_S + TOKEN_S * taken.step.num_tokens) * self.rng.uniform(0.8, 1.3)

    def _submitted(self, end_s: float) -> None:
        self.step_end_s = end_s

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

    async def request(self, prompt: tuple[int, ...], most: int) -> Sent:
        sent = Sent(self.now())
        if self.now() < self.busy.until_s and (refusal := self.busy.refusal(self.now())) is not None:
            sent.told_s = float(dict(refusal.headers)[b"retry-after"])
            return sent
        self.num_full += 1
        name = str(next(self.ids))
        self.streams[name] = events = asyncio.Queue()
        self.core.put(Request(name, prompt, SamplingParams(max_tokens=most, seed=0), self.now()))
        while True:
            event = await events.get()
            if event.finish_reason is FinishReason.ERROR:
                assert event.error_kind == "capacity"
                sent.told_s = event.retry_after_s
                self.busy.rejected(busy(event.error or "", "queue_full", int(sent.told_s)), self.now())
                return sent
            sent.first_s = sent.first_s or self.now()
            if event.finish_reason is not None:
                sent.end_s = self.now()
                return sent

    async def load(self, rate: float, seconds: float) -> list[Sent]:
        """Requests at a Poisson rate; each rejected client comes back once, when it was told to."""
        sent: list[Sent] = []

        async def client() -> None:
            prompt = tuple(self.rng.randrange(500) for _ in range(self.rng.randrange(20, 120)))
            most = self.rng.choice(OUTPUT)
            sent.append(first := await self.request(prompt, most))
            if first.told_s:
                await asyncio.sleep(first.told_s + self.rng.uniform(0.0, 0.5))
                sent.append(await self.request(prompt, most))

        async with asyncio.TaskGroup() as group:
            end_s = self.now() + seconds
            while self.now() < end_s:
                await asyncio.sleep(self.rng.expovariate(rate))
                group.create_task(client())
        return sent


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
    return float(np.percentile([one.first_s - one.sent_s for one in sent if one.end_s], 99))


async def below(server: Server, seconds: float = 6.0) -> float:
    """p99 TTFT at 0.9 of the sustainable rate."""
    return p99(await server.load(0.9 * PER_S, seconds))


@pytest.mark.parametrize(("times", "seed"), [(3, 1), (6, 2), (60, 3)])
def test_the_engine_stays_busy_under_overload(times: int, seed: int) -> None:
    """Also where far more are rejected per second than the engine could look at in full."""
    limit_s = 1.5 * scripted(seed, below)
    seconds = 8.0

    async def overload(server: Server) -> None:
        least_s = await below(server)
        begin_s, full_before = server.now(), server.num_full
        sent = await server.load(times * PER_S, seconds)
        # The first second fills the seats.
        good = sum(begin_s + 1.0 < one.end_s <= begin_s + seconds for one in sent) / (seconds - 1.0)
        ratio, num_full = p99(sent) / least_s, server.num_full - full_before
        print(f"{times} ×: p99 TTFT {ratio:.2f} ×; {good:.1f} per s; {num_full} of {len(sent)} in full")
        assert ratio <= 2.0
        assert good >= 0.9 * PER_S
        assert num_full <= PER_WINDOW * (server.now() - begin_s) / WINDOW_S

    scripted(seed, overload, max_ttft_s=limit_s)

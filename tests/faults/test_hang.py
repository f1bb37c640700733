"""An engine that hangs: probes tell, deadlines hold, a kill is late and rare, and no stream shows any of it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.live import LiveServer
from tests.faults.processes import children, engine_of, stopped, title_of, wait_for

# Ample for what the tests do to an engine that stands still, on a machine that others load.
HANG_TIMEOUT_S = 6.0
LONG: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "temperature": 0.9, "logprobs": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    command = ["-m", "quire.cli", "serve", "quill", "--port", "0", "--threads", "1", "--max-restarts", "99"]
    command += ["--hang-timeout-s", str(HANG_TIMEOUT_S)]
    with LiveServer(command, tmp_path_factory.mktemp("hang") / "log") as live:
        yield live
        assert live.stop() == 0, live.log.read_text()


def ask(server: LiveServer, seed: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "quill", "prompt": f"Once upon a time, {seed}", "seed": seed, **LONG, **fields}
    answer: dict[str, Any] = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
    return answer


def choices(answer: dict[str, Any]) -> Any:
    return answer["choices"], answer["usage"]["completion_tokens"]


def ready(server: LiveServer) -> httpx.Response:
    return httpx.get(server.url + "/readyz", timeout=60)


class Streams:
    """Requests that run in the background while the block does something to the engine."""

    def __init__(self, server: LiveServer, count: int, **fields: Any) -> None:
        self._server, self._count, self._fields = server, count, fields
        self._pool = ThreadPoolExecutor(count)

    def __enter__(self) -> Streams:
        before = self._server.metric("vllm:generation_tokens_total")
        self.asked = [self._pool.submit(ask, self._server, i, **self._fields) for i in range(self._count)]
        wait_for(lambda: self._server.metric("vllm:generation_tokens_total") > before + 8 * self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def answers(self) -> list[Any]:
        return [choices(asked.result()) for asked in self.asked]


def test_processes_have_their_names(server: LiveServer) -> None:
    assert title_of(server.process.pid) == "quire: api"
    assert title_of(engine_of(server)) == "quire: engine"
    grammar = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    body = {"model": "quill", "messages": [{"role": "user", "content": "a number"}], "max_tokens": 2}
    httpx.post(server.url + "/v1/chat/completions", json={**body, "response_format": grammar}, timeout=60)
    assert children(server, "quire: helper")


def test_a_stopped_engine_is_not_ready_and_goes_on(server: LiveServer) -> None:
    alone = [choices(ask(server, i)) for i in range(3)]
    with Streams(server, 3) as streams:
        with stopped(engine_of(server)):
            wait_for(lambda: ready(server).status_code == 503)
            body = ready(server).json()
            assert body["status"] == "hung"
            assert "no sign of life" in body["reason"]
            assert "state T" in body["reason"]
            assert httpx.get(server.url + "/livez").status_code == 200
            wait_for(lambda: "engine_hangs" in server.log.read_text())
        wait_for(lambda: ready(server).status_code == 200)
        assert streams.answers() == alone
    assert "engine_died" not in server.log.read_text()


def test_an_idle_engine_that_hangs_is_noticed_too(server: LiveServer) -> None:
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0)
    engine = engine_of(server)
    with stopped(engine):
        wait_for(lambda: ready(server).status_code == 503)
    wait_for(lambda: ready(server).status_code == 200)
    assert engine_of(server) == engine


def test_a_deadline_holds_while_the_engine_hangs(server: LiveServer) -> None:
    engine = engine_of(server)
    with stopped(engine):
        answer = httpx.post(
            server.url + "/v1/completions",
            json={"model": "quill", "prompt": "x", **LONG, "deadline_ms": {"first_token": 400}},
            timeout=60,
        )
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    wait_for(lambda: ready(server).status_code == 200)
    assert engine_of(server) == engine, "the answer did not wait until it was replaced"


@pytest.mark.slow
def test_a_hung_engine_is_replaced_and_streams_are_equal(server: LiveServer) -> None:
    alone = [choices(ask(server, i, n=2)) for i in range(2)]
    engine = engine_of(server)
    with Streams(server, 2, n=2) as streams:
        with stopped(engine):
            begin_s = time.monotonic()
            wait_for(lambda: title_of(engine) != "quire: engine")
            assert time.monotonic() - begin_s > HANG_TIMEOUT_S - 0.5
        assert streams.answers() == alone
    assert engine_of(server) != engine
    wait_for(lambda: ready(server).status_code == 200)
    log = server.log.read_text()
    assert "The engine hung and was killed" in log
    assert log.count("engine_died") == 1


@pytest.mark.slow
def test_a_laptop_that_slept_is_no_hang(server: LiveServer) -> None:
    """The engine and the API process are stopped together for longer than the timeout."""
    engine, before = engine_of(server), server.log.read_text().count("engine_died")
    with Streams(server, 2) as streams:
        with stopped(server.process.pid, engine):
            time.sleep(HANG_TIMEOUT_S + 1.0)
        streams.answers()
    assert engine_of(server) == engine
    assert server.log.read_text().count("engine_died") == before


@pytest.mark.slow
def test_a_busy_loop_leaves_its_stacks_and_its_plan(tmp_path: Path) -> None:
    """Also one that holds the GIL, which no thread of Python's could report."""
    command = ["-m", "tests.faults.serve_stuck", "30"]
    with (
        LiveServer(
            command, tmp_path / "log", env={"TMPDIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
        ) as live,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(ask, live, 1, model="toy", max_tokens=8, logprobs=None)
        wait_for(lambda: ready(live).status_code == 503)
        wait_for(lambda: "engine_restarted" in live.log.read_text())
        (dump,) = tmp_path.rglob("quire-*-hang.txt")
        text = dump.read_text()
        assert "in stuck" in text, text
        assert "step 3: 1 sequences" in text, text
        assert len(asked.result()["choices"][0]["text"]) > 0


@pytest.mark.slow
def test_twenty_hangs_are_noticed_in_time(server: LiveServer) -> None:
    """Each within twice the predicted step and a second; the streams beside them equal undisturbed ones."""
    rng = random.Random(5)
    alone = [choices(ask(server, i, max_tokens=480)) for i in range(8)]
    took: list[float] = []
    for number in range(20):
        with Streams(server, 8, max_tokens=480) as streams:
            time.sleep(rng.uniform(0.0, 0.1))
            with stopped(engine_of(server)):
                took.append(wait_for(lambda: ready(server).status_code == 503, interval_s=0.005))
                reason = ready(server).json()["reason"]
                predicted_s = float(reason.partition("expected to take ")[2].split()[0])
                assert took[-1] <= 2 * predicted_s + 1.0 + 0.25, (number, reason)  # 0.25 s: of this probe
            assert streams.answers() == alone
        wait_for(lambda: ready(server).status_code == 200)
    print(f"20 hangs noticed after {min(took):.3f} … {max(took):.3f} s; streams equal: 160 of 160")

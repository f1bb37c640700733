"""The engine in a child process: messages, death in both directions, load errors, idleness."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.toy import VOCAB, engine_config
from tests.fakes.engine import FAKE
from tests.fakes.model import FakeModel, fake_tokens

from quire.clock import WallClock
from quire.engine import process
from quire.engine.messages import AbortRequest, ChangePolicy, FinishSample, Reply
from quire.engine.process import Boot, Events, ProcessClient, decode, encode
from quire.engine.spawn import EngineProcess
from quire.engine.supervisor import RestartPolicy, Supervisor
from quire.errors import EngineDeadError, ModelLoadError, RequestError
from quire.request import FinishReason, Request, SampleTiming, SamplingParams, TokenEvent, TokenLogprobs
from quire.scheduler.settings import PolicyChange

ROOT = Path(__file__).resolve().parents[2]


def request(name: str, *, n: int = 1, max_tokens: int = 20, seed: int = 5, **sampling: object) -> Request:
    params = SamplingParams(n=n, max_tokens=max_tokens, seed=seed, **sampling)  # type: ignore[arg-type]
    return Request(name, tuple(name.encode()) * 3, params, WallClock().now())


def expected(asked: Request) -> list[tuple[int, ...]]:
    limit = asked.sampling.max_tokens or 0
    model = FakeModel(vocab_size=VOCAB)
    return [
        tuple(fake_tokens(asked.prompt_token_ids, asked.sampling, i, limit, model))
        for i in range(asked.sampling.n)
    ]


class Collected:
    """Return tokens and terminal events of each sample."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], list[TokenEvent]] = {}

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    def take(self, events: list[TokenEvent]) -> None:
        for event in events:
            key = (event.request_id, event.sample_index)
            self.tokens.setdefault(key, []).extend(event.token_ids)
            if event.finish_reason is not None:
                self.ends.setdefault(key, []).append(event)

    def check(self, asked: list[Request]) -> None:
        for one in asked:
            for index, tokens in enumerate(expected(one)):
                assert tuple(self.tokens[one.request_id, index]) == tokens
                (end,) = self.ends[one.request_id, index]
                assert end.finish_reason is FinishReason.LENGTH


@pytest.fixture
def client() -> Iterator[ProcessClient]:
    made = ProcessClient(engine_config(), executor=f"{FAKE}@3")  # ms per step: messages arrive between two
    yield made
    made.close()


def gone(pid: int) -> bool:
    """Return whether a process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_a_start_without_disk_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[EngineProcess] = []

    def start(executor: str) -> EngineProcess:
        made.append(EngineProcess(executor))
        return made[-1]

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(process, "EngineProcess", start)
    monkeypatch.setattr(process, "Heartbeat", full)
    with pytest.raises(OSError, match="No space left"):
        ProcessClient(engine_config(), executor=FAKE)
    assert gone(made[0].pid)
    assert not made[0].directory.exists()


def test_requests_through_a_child(client: ProcessClient) -> None:
    info = client.wait_ready()
    assert info.pid == client.pid != os.getpid()
    assert info.num_kv_tokens == 64 * 16
    asked = [
        request("a", n=3),
        request("b", max_tokens=7, seed=9),
        request("aborted"),
        request("stopped", max_tokens=400),
    ]
    for one in asked:
        client.send(one)
    client.send(AbortRequest("aborted"))
    seen = Collected()
    while len(seen.ends) < 6:
        seen.take(client.receive())
        if ("stopped", 0) not in seen.ends and len(seen.tokens.get(("stopped", 0), ())) == 2:
            client.send(FinishSample("stopped", 0, 2))
    seen.check(asked[:2])
    assert seen.ends["aborted", 0][0].finish_reason is FinishReason.ABORT
    assert seen.ends["stopped", 0][0].finish_reason is FinishReason.STOP
    wait_for(lambda: client.receive(0.05) == [] and client.stats().num_running == 0)
    stats = client.stats()
    assert stats.num_requests == 4
    assert stats.num_free_blocks + stats.num_idle_blocks == stats.num_blocks


def test_wire_keeps_every_field() -> None:
    sampling = SamplingParams(
        n=2, stop=["a"], logit_bias={3: -1.5}, max_tokens=3, bad_words=["b"], logprobs=2, stop_token_ids=[4]
    ).resolve(seed=7, max_tokens=2, eos_token_ids=(9,), bad_words_token_ids=((1, 2),))
    asked = Request("r", (1, 2), sampling, 1.5, output_token_ids=((1,), ()), finished_samples=(1,))
    entry = TokenLogprobs(5, -0.25, 1, (5, 6), (-0.25, -2.0))
    event = TokenEvent("r", 1, (5,), (entry,), FinishReason.STOP, 5, timing=SampleTiming(3, ttft_s=0.5))
    reply = Reply("7", {"order": "fcfs", "max_queue": 3}, {"order": "slo"}, "no", "order")
    change = ChangePolicy("7", PolicyChange(gate="static", dynamic_max_wait_s=0.5))
    for value in (asked, Events([event], [reply]), Boot(engine_config(), "info"), change):
        assert decode(encode(value)) == value


def test_a_child_that_is_not_watched_is_never_hung() -> None:
    client = ProcessClient(engine_config(), executor=f"{FAKE}@3", watches_hangs=False)
    try:
        assert client.health().status == "loading"
        client.wait_ready()
        os.kill(client.pid, signal.SIGSTOP)
        time.sleep(1.0)
        assert client.health().status == "ready"
        os.kill(client.pid, signal.SIGCONT)
        asked = request("a")
        client.send(asked)
        seen = Collected()
        while not seen.ends:
            seen.take(client.receive())
        seen.check([asked])
    finally:
        client.close()


def test_a_killed_child_is_reported() -> None:
    client = ProcessClient(engine_config(), executor=FAKE)
    client.wait_ready()
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        client.receive()
    client.send(AbortRequest("x"))  # lost, but harmless
    client.close()


def test_closing_ends_the_child_and_wakes_the_reader(client: ProcessClient) -> None:
    client.wait_ready()
    pid = client.pid
    client.close()
    client.close()
    assert gone(pid)
    assert client.receive() == []


def test_closing_while_loading(client: ProcessClient) -> None:
    client.close()
    with pytest.raises(EngineDeadError, match="closed"):
        client.wait_ready()


def test_sigint_and_sigterm_are_the_parents_affair(client: ProcessClient) -> None:
    client.wait_ready()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(client.pid, number)
    asked = request("a")
    client.send(asked)
    seen = Collected()
    while not seen.ends:
        seen.take(client.receive())
    seen.check([asked])


def test_no_orphan_stays_when_the_parent_is_killed() -> None:
    code = (
        "from tests.engine.toy import engine_config\n"
        "from quire.engine.process import ProcessClient\n"
        "client = ProcessClient(engine_config(), executor='tests.fakes.engine:build@50')\n"
        "client.wait_ready()\n"
        "print(client.pid, client._process.directory, flush=True)\n"
        "client.receive()\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        assert not gone(int(pid))
        parent.kill()
    wait_for(lambda: gone(int(pid)))
    wait_for(lambda: not Path(directory).exists())


def test_a_stopped_engine_ends_with_its_parent() -> None:
    code = (
        "from tests.engine.toy import engine_config\n"
        "from quire.engine.process import ProcessClient\n"
        "client = ProcessClient(engine_config(), executor='tests.fakes.engine:build')\n"
        "client.wait_ready()\n"
        "print(client.pid, flush=True)\n"
        "client.receive()\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        parent.kill()
    wait_for(lambda: gone(pid))


def test_closing_a_hung_engine_does_not_wait_for_it(
    client: ProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    graces: list[float] = []
    close = EngineProcess.close

    def watched(process: EngineProcess, grace_s: float) -> None:
        graces.append(grace_s)
        close(process, grace_s)

    monkeypatch.setattr(EngineProcess, "close", watched)
    client.wait_ready()
    os.kill(client.pid, signal.SIGSTOP)
    wait_for(lambda: client.receive(0.1) == [] and client.health().status == "hung")
    client.close()
    assert graces == [0.0]
    assert gone(client.pid)


def test_streams_survive_sigkill_of_the_engine() -> None:
    config = engine_config()

    def start() -> ProcessClient:
        return ProcessClient(config, executor=f"{FAKE}@5")

    first = start()
    supervisor = Supervisor(first, start, WallClock(), RestartPolicy(backoff_s=0.0))
    supervisor.wait_ready()
    asked = [request(f"r{i}", n=1 + i % 3, max_tokens=30 + i, seed=i) for i in range(6)]
    for one in asked:
        supervisor.send(one)
    num_samples = sum(one.sampling.n for one in asked)
    seen = Collected()
    kills = [40, 150]
    while len(seen.ends) < num_samples:
        seen.take(supervisor.receive())
        if kills and seen.num_tokens > kills[0]:
            kills.pop(0)
            os.kill(supervisor.client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    seen.check(asked)
    assert supervisor.num_restarts == 2
    supervisor.close()


def test_a_model_that_cannot_load_is_one_line_with_its_own_type(tmp_path: Path) -> None:
    config = engine_config()
    config = replace(config, model=replace(config.model, path=str(tmp_path)))  # an empty folder
    client = ProcessClient(config, executor="local")
    with pytest.raises(ModelLoadError) as caught:
        client.wait_ready()
    assert "\n" not in str(caught.value)
    client.close()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_idle_costs_less_than_one_percent_of_a_core(client: ProcessClient) -> None:
    client.wait_ready()
    client.receive(1.0)
    before = cpu_s(client.pid), time.process_time()
    client.receive(20.0)
    child, parent = cpu_s(client.pid) - before[0], time.process_time() - before[1]
    print(f"idle for 20 s: child {child:.3f} s, parent {parent:.3f} s of CPU")
    assert child < 0.2
    assert parent < 0.2


def test_sampling_is_checked_at_the_edge_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="temperature = -1"):
        SamplingParams(temperature=-1)
    asked = SamplingParams(temperature=0.5, stop="x")
    monkeypatch.setattr("quire.request._check", None)
    resolved = asked.resolve(seed=1, max_tokens=2, eos_token_ids=(3,), bad_words_token_ids=())
    value = Request("r", (1,), resolved, 0.0)
    assert decode(encode(value)) == value

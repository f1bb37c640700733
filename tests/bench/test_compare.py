"""Recorded requests through another engine: equal tokens are no drift; other tokens and latencies are."""

from __future__ import annotations

import json
import os
import signal
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.toy import engine_config
from tests.fakes.engine import FAKE

from quire.clock import WallClock
from quire.engine.in_process import InProcessClient
from quire.engine.messages import AbortRequest, FinishSample
from quire.engine.process import ProcessClient
from quire.engine.request_log import RequestLog, keep_requests, read_requests
from quire.engine.supervisor import RestartPolicy, Supervisor
from quire.errors import ConfigError
from quire.images.prepared import Piece
from quire.request import Request, Sampling, TokenEvent
from quire_lab.bench.compare import Comparison, Median, compare, report

pytestmark = pytest.mark.component

HERE = {"model": "toy", "fingerprint": "f", "kernels": "k", "formats": "f", "device": "d", "quire": "0"}
HERE["determinism"] = "exact"


def request(name: str, seed: int, now_s: float, **fields: Any) -> Request:
    return Request(name, (1, 2, seed), Sampling(**{"max_tokens": 12, "seed": seed, **fields}), now_s)


def engine(step_ms: str = "") -> InProcessClient:
    return InProcessClient(engine_config(), WallClock(), executor=f"{FAKE}@{step_ms}" if step_ms else FAKE)


def run(client: Any, ends: int) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while sum(event.finish_reason is not None for event in events) < ends:
        events += client.receive(0.1)
    return events


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three requests: one with n = 2, one that its client left, one that a stop string ended."""
    path, clock = tmp_path / "requests.jsonl", WallClock()
    client = RequestLog(engine(), path, HERE, clock)
    client.wait_ready()
    client.send(request("a", 1, clock.now(), n=2, temperature=0.7))
    run(client, 2)
    client.send(request("left", 2, clock.now(), max_tokens=100))
    client.receive()
    client.receive()
    client.send(AbortRequest("left"))
    client.send(request("stopped", 3, clock.now(), max_tokens=100))
    num_tokens = 0
    while num_tokens < 5:
        num_tokens += sum(len(event.token_ids) for event in client.receive() if event.request_id == "stopped")
    client.send(FinishSample("stopped", 0, 4))
    run(client, 1)
    client.close()
    return path


def test_what_was_recorded_is_what_was_sent(trace: Path) -> None:
    about, (a, left, stopped) = read_requests(trace)
    assert about == HERE
    assert trace.stat().st_mode & 0o777 == 0o600
    assert [len(sample.token_ids) for sample in a.samples] == [12, 12]
    assert [sample.finish_reason for sample in a.samples] == ["length", "length"]
    assert all(sample.ttft_s is not None and sample.e2el_s is not None for sample in a.samples)
    assert a.request.sampling.n == 2
    assert left.samples[0].finish_reason is None
    assert left.samples[0].token_ids
    assert stopped.samples[0].finish_reason == "stop_string"
    assert len(stopped.samples[0].token_ids) == 4


def test_the_same_engine_does_not_drift(trace: Path) -> None:
    client = engine()
    client.wait_ready()
    about, found = compare(client, trace, WallClock())
    client.close()
    assert found.differences == ()
    assert found.num_requests == 3
    text, drifts = report(about, HERE, found, allowed=100.0)
    assert not drifts
    assert text.endswith("no drift")


def test_another_token_is_drift_and_is_named(trace: Path) -> None:
    lines = trace.read_text().splitlines()
    recorded = json.loads(lines[1])
    recorded["samples"][1]["token_ids"][7] += 1
    lines[1] = json.dumps(recorded)
    trace.write_text("\n".join(lines) + "\n")
    client = engine()
    client.wait_ready()
    about, found = compare(client, trace, WallClock())
    client.close()
    (difference,) = found.differences
    assert difference.startswith("a, sample 1: token 7: expected ")
    assert report(about, HERE, found, allowed=100.0)[1]
    assert not report(about, {**HERE, "determinism": "batch-dependent"}, found, allowed=100.0)[1]


def test_slower_steps_are_drift(trace: Path) -> None:
    client = engine("20")
    client.wait_ready()
    about, found = compare(client, trace, WallClock())
    client.close()
    assert found.differences == ()
    text, drifts = report(about, HERE, found, allowed=0.5)
    assert drifts
    assert "drift" in next(line for line in text.splitlines() if line.startswith("TPOT"))


def test_medians_drift_beyond_the_share_and_the_least() -> None:
    assert Median("TTFT", 0.100, 0.130).drifts(0.25)
    assert not Median("TTFT", 0.100, 0.120).drifts(0.25)
    assert not Median("TTFT", 0.0001, 0.0009).drifts(0.25)
    assert not Median("TTFT", None, 1.0).drifts(0.25)
    assert report(HERE, HERE, Comparison(1, 0, 1, (), (Median("TTFT", 0.1, 0.2),)), 0.25)[1]


@pytest.mark.parametrize("text", ["", "{}\n", '{"about": {}}\n{"request": 1}\n', '{"about": {}}\n'])
def test_bad_files_are_config_errors(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    client = engine()
    with pytest.raises(ConfigError, match=r"bad\.jsonl"):
        compare(client, path, WallClock())
    client.close()


def test_kill_of_an_engine_leaves_its_requests_in_a_file(tmp_path: Path) -> None:
    config, clock = engine_config(), WallClock()
    first = ProcessClient(config, executor=f"{FAKE}@20")
    policy = RestartPolicy(max_restarts=1)
    client = Supervisor(first, lambda: ProcessClient(config, executor=FAKE), clock, policy)
    client.on_death = lambda requests: keep_requests(tmp_path, requests, HERE)
    client.wait_ready()
    client.send(request("a", 1, clock.now(), n=2, max_tokens=40))
    before: list[TokenEvent] = []
    while len(before) < 6:
        before += client.receive()
    os.kill(first.pid, signal.SIGKILL)
    after = run(client, 2)
    client.close()
    (path,) = tmp_path.iterdir()
    _, (found,) = read_requests(path)
    assert found.request.request_id == "a"
    assert not found.has_ended
    for index, sample in enumerate(found.samples):
        whole = [i for event in (*before, *after) if event.sample_index == index for i in event.token_ids]
        assert 0 < len(sample.token_ids) < 40
        assert sample.token_ids == whole[: len(sample.token_ids)]
    # And so they can be run again.
    again = engine()
    again.wait_ready()
    assert compare(again, path, clock)[1].differences == ()
    again.close()


def test_log_names_images_without_their_pixels(tmp_path: Path) -> None:
    """And a request that has one is not run again, since nothing could be seen."""
    path, clock = tmp_path / "requests.jsonl", WallClock()
    client = RequestLog(engine(), path, HERE, clock)
    client.wait_ready()
    span = Piece((8, 8), b"pixels" * 50).span(1, 2)
    client.send(replace(request("seen", 1, clock.now()), spans=(span,)))
    client.send(request("plain", 2, clock.now()))
    run(client, 2)
    client.close()
    assert b64encode(b"pixels" * 2) not in path.read_bytes()
    _, found = read_requests(path)
    (recorded,) = (one.request for one in found if one.request.spans)
    assert recorded.spans == (span._replace(data=b""),)
    again = engine()
    again.wait_ready()
    comparison = compare(again, path, clock)[1]
    again.close()
    assert (comparison.num_requests, comparison.num_skipped, comparison.differences) == (1, 1, ())


def test_a_full_disk_ends_the_log_and_not_the_requests() -> None:
    client = RequestLog(engine(), Path("/dev/full"), HERE, WallClock())
    client.wait_ready()
    client.send(replace(request("a", 1, 0.0)))
    assert len(run(client, 1)) == 12
    client.close()

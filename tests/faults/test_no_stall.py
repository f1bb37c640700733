"""No request stalls another: probes and short requests beside hostile bodies and many texts, on a live server."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

import httpx
import pytest
from tests.e2e.live import ROOT, LiveServer
from tests.faults.hostile import ATTACKS, words
from tests.faults.probe import Probe, send_raw

# Each held the process for seconds, once.
QUICK = (
    "words_4mb",
    "many_messages",
    "stop_1m",
    "detokenize_1m",
    "empty_objects_1mb",
    "header_parameters_100k",
)


def undisturbed_ms(server: LiveServer) -> float:
    with Probe(server.url) as probe:
        time.sleep(0.5)
    assert probe.statuses == {"200": len(probe.latencies_ms)}
    return probe.max_ms


def attacked(server: LiveServer, name: str) -> tuple[int, Probe]:
    path, media_type, body = ATTACKS[name]()
    with Probe(server.url) as probe:
        status, _ = send_raw(server.url, path, body, media_type=media_type)
    return status, probe


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_probes_answer_beside_a_hostile_body(server: LiveServer, name: str) -> None:
    quiet_ms = undisturbed_ms(server)
    status, probe = attacked(server, name)
    assert status in (200, 400)
    assert not probe.failed
    assert set(probe.statuses) == {"200"}
    # On a machine that other tests load: the undisturbed run says how slow that is.
    assert probe.quantile_ms(0.99) < 300 + 10 * quiet_ms, probe.describe()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ATTACKS) - set(QUICK)))
def test_probes_answer_beside_every_hostile_body(server: LiveServer, name: str) -> None:
    test_probes_answer_beside_a_hostile_body(server, name)


@pytest.mark.slow
def test_probes_answer_beside_a_burst_of_2000(server: LiveServer) -> None:
    with Probe(server.url) as probe:
        command = [sys.executable, "-m", "tests.faults.burst", server.url, "2000"]
        said = json.loads(subprocess.check_output(command, cwd=ROOT, timeout=280))
    assert set(said["statuses"]) <= {"200", "503"}
    assert sum(said["statuses"].values()) == 2000
    assert not probe.failed
    assert probe.quantile_ms(0.99) < 300, probe.describe()


def begin(server: LiveServer, path: str, body: object) -> socket.socket:
    """Send a request and return its connection."""
    parts = urlsplit(server.url)
    raw = json.dumps(body).encode()
    sock = socket.create_connection((parts.hostname, parts.port), 60)
    head = f"POST {path} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    sock.sendall(head.encode() + raw)
    return sock


def until(server: LiveServer, name: str, wanted: bool) -> None:
    """Wait until the metric is above zero, or zero."""
    start_s = time.monotonic()
    while (server.metric(name) > 0) is not wanted:
        assert time.monotonic() - start_s < 60, name
        time.sleep(0.02)


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", pytest.param("/v1/rerank", marks=pytest.mark.slow),
             pytest.param("/v1/score", marks=pytest.mark.slow)]
)  # fmt: skip
def test_a_client_that_leaves_ends_its_many_texts(server: LiveServer, path: str) -> None:
    """A short request beside them is served soon, and after the disconnect nothing of them runs."""
    texts = [f"{i} {words(2000)}" for i in range(249)]
    body = {
        "/v1/rerank": {"query": "a fox", "documents": texts},
        "/v1/score": {"text_1": "a fox", "text_2": texts},
        "/v1/embeddings": {"input": texts},
    }[path]
    sock = begin(server, path, body)
    until(server, "vllm:num_requests_running", True)
    short = httpx.post(server.url + "/v1/completions", json={"prompt": "Once", "max_tokens": 1}, timeout=120)
    assert short.status_code == 200
    still = server.metric("vllm:num_requests_running") + server.metric("vllm:num_requests_waiting")
    sock.close()
    until(server, "vllm:num_requests_running", False)
    assert server.metric("vllm:num_requests_waiting") == 0
    time.sleep(0.3)
    assert server.metric("vllm:num_requests_running") == 0  # the rest was never admitted
    assert still < 249


def test_a_client_that_leaves_ends_its_text_in_the_helper(server: LiveServer) -> None:
    """/tokenize has no work in the engine: its disconnect is seen all the same."""
    counted = server.metric("quire:http_disconnects_total")
    sock = begin(server, "/tokenize", {"prompt": words(4 * 10**6)})
    time.sleep(0.5)
    sock.close()
    start_s = time.monotonic()
    while server.metric("quire:http_disconnects_total") == counted:
        assert time.monotonic() - start_s < 60
        time.sleep(0.05)
    answer = httpx.post(server.url + "/tokenize", json={"prompt": words(300_000)}, timeout=120)
    assert answer.status_code == 200
    assert answer.json()["count"] > 10_000

"""No value breaks the books of a real model behind a live server: bodies, forms, lines; SIGTERM is quick after."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from tests.api.test_api_extremes import CHAT, FOUND, INTEGERS, STRINGS, bodies, raw_of
from tests.e2e.live import LiveServer
from tests.faults.conftest import COMMAND, TINY

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of its own: at the end it is idle, has had no restart, and ends soon after SIGTERM."""
    folder = tmp_path_factory.mktemp("attacked")
    with LiveServer([*COMMAND, "--batch-dir", str(folder / "batches")], folder / "log") as live:
        yield live
        deadline_s = time.monotonic() + 60
        while live.metric("vllm:num_requests_running") + live.metric("vllm:num_requests_waiting"):
            assert time.monotonic() < deadline_s, "requests are left"
            time.sleep(0.1)
        assert live.metric("vllm:kv_cache_usage_perc") == 0
        assert httpx.post(live.url + "/v1/completions", json=TINY, timeout=60).status_code == 200
        log = live.log.read_text(errors="replace")
        assert live.stop() == 0, log
        assert "request_crashed" not in log, log
        assert "engine_restart" not in log, log


def check(server: LiveServer, path: str, raw: bytes) -> None:
    answer = httpx.post(server.url + path, content=raw, headers=JSON, timeout=60)
    if b"deadline_ms" not in raw:  # else 503 and 504 are right
        assert answer.status_code < 500, f"{path} {raw!r:.600} -> {answer.status_code} {answer.text:.600}"


@pytest.mark.parametrize(("path", "body", "param"), FOUND)
def test_what_was_found_is_refused_by_the_real_engine(
    attacked: LiveServer, path: str, body: dict[str, Any], param: str
) -> None:
    answer = httpx.post(attacked.url + path, content=raw_of(body), headers=JSON, timeout=60)
    assert answer.status_code == 400
    assert param in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_forbid_every_token_are_the_clients(attacked: LiveServer, stream: bool) -> None:
    body = {"prompt": "hi", "max_tokens": 4, "min_tokens": 2, "stop_token_ids": [5], "allowed_token_ids": [5]}
    answer = httpx.post(attacked.url + "/v1/completions", json={**body, "stream": stream}, timeout=60)
    assert answer.status_code == 400, answer.text
    assert "forbid every id" in answer.text


@pytest.mark.slow
@seed(17)
@settings(
    max_examples=int(os.environ.get("EXTREMES", "1500")) // 15,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(request=bodies())
def test_extremes_through_the_real_engine(attacked: LiveServer, request: tuple[str, bytes]) -> None:
    check(attacked, *request)


def forms() -> Iterator[tuple[bytes, bytes]]:
    """(boundary, body) of damaged and extreme forms."""
    rng = random.Random(3)
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": TINY}).encode()
    whole = (
        b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        + line
        + b"\r\n--b--\r\n"
    )
    yield b"b", whole
    for _ in range(25):
        start, end = sorted(rng.sample(range(len(whole)), 2))
        yield b"b", whole[:start] + whole[end:]
    for name in STRINGS:
        text = name.encode("utf-8", "surrogatepass")
        yield b"b", whole.replace(b"purpose", text, 1)
        yield b"b", whole.replace(b"a.jsonl", text, 1)
        yield b"b", whole.replace(b"\r\n\r\nbatch", b"\r\n\r\n" + text, 1)
    yield b"b" * 70, whole
    yield b"", whole
    yield b"b" + b"; x=y" * 1000, whole
    yield b"b", whole.replace(b"form-data;", b"form-data" + b"; a=b" * 20_000, 1)
    yield b"b", whole.replace(b"form-data;", b"form-data; filename*=utf-8''%FF%00%;", 1)
    yield b"b", b"--b\r\n\r\n\r\n" * 30 + whole


@pytest.mark.slow
def test_forms_of_any_shape_are_answered(attacked: LiveServer) -> None:
    statuses = []
    for boundary, body in forms():
        kind = {"content-type": b"multipart/form-data; boundary=" + boundary}
        answer = httpx.post(attacked.url + "/v1/files", content=body, headers=kind, timeout=60)
        assert answer.status_code in (200, 400), f"{boundary!r:.80} {body!r:.400} -> {answer.text:.400}"
        statuses.append(answer.status_code)
    assert statuses[0] == 200
    assert statuses.count(400) > 20


def lines() -> Iterator[bytes]:
    """Lines of a batch, of which each is a request with an extreme value, or no request."""
    values = [*INTEGERS[::5], *STRINGS, [], {}, 1e308, float("nan")]
    for i, value in enumerate(values):
        for name in ("max_tokens", "temperature", "priority", "stop"):
            body = {**CHAT, name: value}
            yield raw_of(
                {"custom_id": f"{i}-{name}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            )
        yield raw_of({"custom_id": value, "method": value, "url": value, "body": value})
    yield b"[" * 2000
    yield b"{" * 200_000
    yield b'{"custom_id": "x", "body": {"prompt": [' + b"[]," * 200_000 + b"[]]}}"


def batch_of(server: LiveServer, content: bytes) -> dict[str, Any]:
    """Run a batch and return it at its end."""
    files = {"file": ("a.jsonl", content), "purpose": (None, "batch")}
    uploaded = httpx.post(server.url + "/v1/files", files=files, timeout=60).json()
    given = {"input_file_id": uploaded["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = httpx.post(server.url + "/v1/batches", json=given, timeout=60).json()
    deadline_s = time.monotonic() + 120
    while batch["status"] not in ("completed", "failed"):
        assert time.monotonic() < deadline_s, batch
        time.sleep(0.1)
        batch = httpx.get(f"{server.url}/v1/batches/{batch['id']}", timeout=60).json()
    return dict(batch)


def test_batch_lines_of_any_value_are_answered(attacked: LiveServer, tmp_path: Path) -> None:
    fine = [line for line in lines() if line.startswith(b'{"custom_id": "') and b'"method": "POST"' in line]
    refused = batch_of(attacked, b"\n".join(lines()))
    assert refused["status"] == "failed"
    assert refused["errors"]["data"]
    kept = [
        line
        for line in fine
        if b"NaN" not in line
        and b'"priority"' not in line
        and b"\\ud" not in line
        and b"9" * 4301 not in line
    ]
    done = batch_of(attacked, b"\n".join(kept))
    if done["status"] == "failed":
        raise AssertionError(done["errors"])
    counts = done["request_counts"]
    assert counts["completed"] + counts["failed"] == counts["total"] == len(kept)
    too_long = b'{"custom_id": "x", "body": "' + b"x" * (5 * 2**20) + b'"}'
    assert "line_too_large" in str(batch_of(attacked, too_long)["errors"])

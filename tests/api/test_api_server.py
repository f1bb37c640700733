"""The server process: ready, drain, disconnects over real sockets, exit status."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.api.fake_frontend import ANSWER, FailingFrontend
from websockets.sync.client import connect

from quire.api.app import create_app
from quire.api.server import run
from quire.api.settings import ApiSettings
from quire.errors import ConfigError
from quire.http.listen import bind, load_tls, url_of

ROOT = Path(__file__).resolve().parents[2]
PATH = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@contextmanager
def server(*args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process and its base URL; it is always ended, by its own pid."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.api.serve_fake", *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(60)
        process.stdout.close()
        process.stderr.close()


def texts(lines: Iterator[str]) -> str:
    text = ""
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
                text += choice["delta"].get("content", "")
    return text


def test_sigterm_drains() -> None:
    with server("100", "60") as (process, url), httpx.Client(base_url=url, timeout=60) as client:
        assert client.get("/readyz").status_code == 200
        with client.stream("POST", PATH, json=CHAT) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            with httpx.Client(base_url=url, timeout=60) as other:
                deadline = time.monotonic() + 60
                while other.get("/readyz").status_code != 503:
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                refused = other.post(PATH, json=CHAT)
                assert refused.status_code == 503
                assert "retry-after" in refused.headers
                assert other.get("/livez").status_code == 200
            assert texts(lines) == ANSWER  # what ran, runs to its end
        assert process.wait(60) == 0


def test_disconnects_over_sockets_and_the_end_of_the_grace_time() -> None:
    with server("100", "0.2") as (process, url), httpx.Client(base_url=url, timeout=60) as client:
        with client.stream("POST", PATH, json=CHAT) as stream:
            next(stream.iter_lines())  # dropping the iterator closes the connection
        with pytest.raises(httpx.ReadTimeout):
            client.post(PATH, json={**CHAT, "stream": False}, timeout=0.2)
        label = '{engine="0",model_name="tiny"}'
        deadline = time.monotonic() + 60
        while f"quire:http_disconnects_total{label} 2.0" not in client.get("/metrics").text:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert f"vllm:num_requests_running{label} 0.0" in client.get("/metrics").text

        with client.stream("POST", PATH, json=CHAT) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "aborted"
        assert rest[-1] == "data: [DONE]"
        assert process.wait(60) == 0


def test_a_second_signal_does_not_wait_for_the_grace_time() -> None:
    with (
        server("100", "600") as (process, url),
        httpx.stream("POST", url + PATH, json=CHAT, timeout=60) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        process.send_signal(signal.SIGINT)
        while httpx.get(url + "/readyz", timeout=60).status_code != 503:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_an_engine_that_cannot_start_ends_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = create_app(FailingFrontend(), ApiSettings())  # type: ignore[arg-type]
    with caplog.at_level("ERROR", "quire"):
        assert run(app, port=0) == 1
    (record,) = caplog.records
    assert record.message == "start_failed"
    assert record.fields == {"error": "no model here"}  # type: ignore[attr-defined]


def test_an_address_that_cannot_be_had() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}.*--port"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--host"):
        bind("no.such.host.invalid", 0)
    with bind("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("no openssl on this machine, which makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    made = [program, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=quire", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*made, "-keyout", key, "-out", cert, "-days", "2", *names], check=True, capture_output=True
    )
    return cert, key


def test_a_server_with_a_certificate_speaks_https(pem: tuple[str, str]) -> None:
    with server("0", "5", "", "", *pem) as (process, url):
        assert url.startswith("https://127.0.0.1:")
        trusted = ssl.create_default_context(cafile=pem[0])
        with httpx.Client(base_url=url, verify=trusted) as client:
            assert client.get("/livez").status_code == 200
            with client.stream("POST", PATH, json=CHAT) as answer:
                assert texts(answer.iter_lines()) == ANSWER
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/livez")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_wrong_certificate_is_one_clear_error(pem: tuple[str, str], tmp_path: Path) -> None:
    assert load_tls(None, None) is None
    for cert, key in ((pem[0], None), (None, pem[1]), (pem[1], pem[0]), (pem[0], str(tmp_path / "missing"))):
        with pytest.raises(ConfigError, match="--tls-"):
            load_tls(cert, key)


def test_a_websocket_has_the_events_of_http() -> None:
    with server("1", "5") as (_, url), connect(url.replace("http", "ws", 1) + "/v1/ws") as socket:
        with httpx.Client(base_url=url, timeout=60) as client:
            streamed = texts(iter(client.post(PATH, json=CHAT).text.splitlines()))
        socket.send(json.dumps({"id": "a", "body": CHAT}))
        said = [json.loads(socket.recv(10))]
        while not said[-1].get("done"):
            said.append(json.loads(socket.recv(10)))
        assert said[0]["status"] == 200
        assert said[-2]["data"] == "[DONE]"
        choices = [choice for each in said[1:-2] for choice in each["data"]["choices"]]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == streamed != ""

"""What `quire diagnose` reads from servers that tell much, little or nothing, and what it prints."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from quire.errors import ConfigError
from quire_lab.cli.diagnose import run

GAUGES = "\n".join(
    f'{name}{{engine="0",model_name="m"}} {value}'
    for name, value in (
        ("quire:computed_tokens_total", "%d"),
        ("vllm:num_requests_running", 3), ("vllm:num_requests_waiting", 9), ("vllm:kv_cache_usage_perc", 0.1),
    )
)  # fmt: skip
LIVE = {
    "t": 0, "steps": {}, "chunks": [], "limits": {"max_num_seqs": 3, "max_num_batched_tokens": 64, "gate": "dynamic"},
    "gauges": {"num_running": 3, "num_waiting": 9, "num_blocks": 10, "num_free_blocks": 9, "num_idle_blocks": 0},
}  # fmt: skip
Answers = dict[str, tuple[int, str, str]]


@pytest.fixture
def answers() -> Answers:
    """Path → status, type, body."""
    return {
        "/metrics": (200, "text/plain", GAUGES + "\n"),
        "/v1/models": (200, "application/json", '{"data": [{"id": "m"}]}'),
        "/engine/live": (200, "text/event-stream", f"data: {json.dumps(LIVE)}\n\n: beat\n\n" * 3),
        "/runtime": (200, "application/json", '{"runtime": {"gate": "static", "max_num_seqs": 3}}'),
    }


@pytest.fixture
def url(answers: Answers) -> Iterator[str]:
    asked = itertools.count(1)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, body = answers.get(self.path, (404, "application/json", '{"error": "no"}'))
            body = body.replace("%d", str(next(asked)))
            self.send_response(status)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def diagnosed(url: str, capsys: pytest.CaptureFixture[str], admin_url: str | None = None) -> dict[str, Any]:
    assert run(url, 0.6, None, admin_url, None, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_the_live_feed_is_read(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = diagnosed(url + "/v1/", capsys)
    assert found["figures"]["gate"] == "dynamic"
    assert found["figures"]["waiting"] == 9
    assert "too-few-slots" in {each["name"] for each in found["findings"]}


def test_metrics_do_where_there_is_no_feed(
    url: str, answers: Answers, capsys: pytest.CaptureFixture[str]
) -> None:
    del answers["/engine/live"]
    found = diagnosed(url, capsys)
    assert found["figures"]["running"] == 3
    assert found["figures"]["gate"] is None
    assert diagnosed(url, capsys, admin_url=url)["figures"]["gate"] == "static"


def test_people_get_lines(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(url, 0.5, None, None, None, as_json=False) == 0
    text = capsys.readouterr().out
    assert "1. The batch is limited to too few sequences" in text
    assert "→ --max-num-seqs 15" in text


@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        ("/metrics", (200, "text/plain", "quire_gateway 1\n"), "no metrics of an engine"),
        ("/v1/models", (401, "application/json", "{}"), "--api-key"),
        ("/runtime", (401, "application/json", '{"error": {"message": "bad key"}}'), "bad key"),
    ],
)
def test_what_cannot_be_read_is_an_error(
    url: str, answers: Answers, path: str, answer: tuple[int, str, str], said: str
) -> None:
    answers[path] = answer
    with pytest.raises(ConfigError, match=said):
        run(url, 0.5, None, url, None, as_json=True)


@pytest.mark.parametrize("url", ["ftp://x", "http://127.0.0.1:9"])
def test_no_server_is_an_error(url: str) -> None:
    with pytest.raises(ConfigError, match=r"address of a server|does not answer"):
        run(url, 0.5, None, None, None, as_json=False)

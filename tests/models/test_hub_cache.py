"""`quire pull`, `list` and `rm`, with huggingface_hub's own code: a hub on this machine, a cache in a folder."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.cli.models import size_text
from quire.errors import ModelLoadError
from quire.models import hub
from quire.models.hub import cached_models, locate

pytestmark = pytest.mark.component

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"w" * 5000,
    "pytorch_model.bin": b"no",
}


class FakeHub(BaseHTTPRequestHandler):
    """The few paths of the hub that a download reads."""

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/org/tiny") and "tree" in path:
            entries = [{"type": "file", "path": n, "size": len(d), "oid": "0" * 40} for n, d in FILES.items()]
            self._send(json.dumps(entries).encode(), with_body, "application/json")
        elif path.startswith("/api/models/org/tiny"):
            about = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            self._send(json.dumps(about).encode(), with_body, "application/json")
        elif path.startswith("/org/tiny/resolve/") and name in FILES:
            self._send(FILES[name], with_body, "application/octet-stream")
        else:
            self.send_response(404)
            self.send_header("x-error-code", "RepoNotFound")
            self.send_header("content-length", "0")
            self.end_headers()

    def _send(self, body: bytes, with_body: bool, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", f'"{sha256(body).hexdigest()}"')
        self.send_header("x-repo-commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{listening.server_port}"
        form = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", form)
        yield
        listening.shutdown()
        thread.join()


def quire(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.usefixtures("server")
def test_a_model_is_pulled_listed_and_removed(cache: Path) -> None:
    folder = Path(quire("pull", "org/tiny").strip().splitlines()[-1])
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert folder.name == COMMIT
    listed = quire("list")
    assert "org/tiny" in listed
    assert "5.0 kB" in listed
    assert "quill" in listed
    (model,) = cached_models()
    assert (model.repo, model.num_bytes) == ("org/tiny", 5000 + len(FILES["config.json"]))
    with pytest.raises(ModelLoadError, match="did you mean 'org/tiny'"):
        quire("rm", "org/tine")
    assert "5.0 kB" in quire("rm", "org/tiny")
    assert cached_models() == []


def test_a_machine_without_a_cache_lists_what_ships(cache: Path) -> None:
    assert cached_models() == []
    assert quire("list").splitlines()[1].startswith("quill ")


def test_a_hub_that_does_not_answer_is_given_up(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hub.ANSWER_S <= 4.5
    monkeypatch.setattr(hub, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connects, and never says a word
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        with pytest.raises(ModelLoadError) as error:
            locate("org/tiny")
    assert "cannot be reached" in str(error.value)
    assert "no answer within 0.2 s" in str(error.value)
    assert "\n" not in str(error.value)


def test_sizes_are_short() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 13_376_256, 2_500_000_000)] == [
        "0 B", "999 B", "1.0 kB", "13.4 MB", "2.5 GB",
    ]  # fmt: skip

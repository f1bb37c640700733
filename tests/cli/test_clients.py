"""`--for NAME` prints what points a tool at the server and takes its model names; `quire launch` starts the tool."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from random import Random

import pytest
from tests.api.asgi_client import Api, error_of

import quire
from quire.args import ServerArgs
from quire.cli.clients import Place, find_tool, guide, known_tools, model_names
from quire.errors import ConfigError, NotFoundError
from quire_gateway.catalog import Catalog
from quire_gateway.cli.replicas import gateway_args

PLACE = Place("http://127.0.0.1:8000", "my-model", "secret")
TURN = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("name", known_tools())
def test_every_tool_is_pointed_at_the_server(name: str) -> None:
    tool = find_tool(name)
    lines = tool.lines(PLACE)
    assert lines.startswith(f"{tool.title}:\n")
    assert "http://127.0.0.1:8000" in lines
    assert "my-model" in lines or name == "open-webui"  # which lists the server's models itself
    assert not any(word in lines for word in ("{url}", "{model}", "{key}"))
    assert bool(tool.program) != bool(tool.steps)
    assert bool(tool.program) == bool(tool.install)


def test_an_unknown_tool_is_refused_with_the_nearest() -> None:
    assert find_tool("claude") is find_tool("claude-code")
    with pytest.raises(
        ConfigError, match=r"--for 'claud-code' must be one of claude-code, codex.*claude-code"
    ):
        find_tool("claud-code")


def test_keys_are_not_printed() -> None:
    args = ServerArgs(clients=("claude-code", "zed"), api_key="secret")
    lines = guide(args, PLACE.url, "quill")
    assert "export ANTHROPIC_AUTH_TOKEN=YOUR_KEY\n" in lines
    assert "secret" not in lines
    assert "export ANTHROPIC_AUTH_TOKEN=quire\n" in guide(
        ServerArgs(clients=("claude-code",)), PLACE.url, "quill"
    )


def test_a_tools_model_names_stand_for_the_served_one() -> None:
    api = Api(stand_ins=model_names(["claude-code"]))
    for model in ("claude-sonnet-4-5-20250929", "claude-haiku-4-5"):
        body = {"model": model, "max_tokens": 4, "messages": TURN}
        answer = api.post("/v1/messages", body)
        assert answer.status_code == 200
        assert answer.json()["model"] == api.frontend.model.names[0]
        assert api.post("/v1/messages/count_tokens", body).json()["input_tokens"] > 0
    assert "claude-" in error_of(Api().chat(model="claude-opus-4"), 404)["message"]
    assert "gpt-5" in error_of(api.chat(model="gpt-5"), 404)["message"]


def test_a_gateway_takes_the_names_as_well() -> None:
    args = gateway_args(ServerArgs(clients=("claude-code", "codex")), "k")
    assert args.stand_ins == ("claude-*", "gpt-*", "codex-*")

    def catalog(default: str | None, *served: str) -> Catalog:
        return Catalog({}, default, lambda: list(served), Random(1), stand_ins=args.stand_ins)

    assert catalog(None, "quill").targets("claude-opus-4")[0].model == "quill"
    assert catalog("b", "a", "b").targets("gpt-5")[0].model == "b"
    assert catalog("b", "a", "b", "gpt-5").targets("gpt-5")[0].model == "gpt-5"
    with pytest.raises(NotFoundError):
        catalog("b", "a", "b").targets("llama")


class Models(BaseHTTPRequestHandler):
    """Lists two models to who has the key."""

    def do_GET(self) -> None:
        good = self.path == "/v1/models" and self.headers["authorization"] == "Bearer k"
        body = json.dumps({"data": [{"id": "first"}, {"id": "second"}]}).encode()
        self.send_response(200 if good else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def models() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Models) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def launched(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `quire launch` where the program `claude` prints its arguments and environment."""
    program = folder / "claude"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"
    )
    program.chmod(0o755)
    env = {**os.environ, "PATH": str(folder), "PYTHONPATH": str(Path(quire.__file__).parents[1])}
    command = [sys.executable, "-m", "quire.cli", "launch", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_launch_starts_the_tool_with_the_servers_model(models: str, tmp_path: Path) -> None:
    done = launched(tmp_path, "claude", "--url", models, "--api-key", "k", "-p", "hi")
    assert done.returncode == 0, done.stderr
    arguments, env = json.loads(done.stdout)
    assert arguments == ["-p", "hi"]
    said = {name: env[name] for name in ("ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_MODEL")}
    assert [*said.values()] == [models, "k", "first"]
    other = launched(tmp_path, "claude", "--url", models, "--api-key", "k", "--model", "second")
    assert json.loads(other.stdout)[1]["ANTHROPIC_MODEL"] == "second"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["claude", "--url", "http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9"),
        (["claude", "--url", "URL"], "no server answers at .*401"),
        (["claude", "--url", "URL", "--api-key", "k", "--model", "x"], "must be one of first, second"),
        (["codex"], "no program 'codex'; npm install -g @openai/codex"),
        (["zed"], "quire serve --for zed"),
        (["clade"], "launch 'clade' must be one of claude-code"),
    ],
)
def test_what_launch_lacks_is_one_line(arguments: list[str], said: str, models: str, tmp_path: Path) -> None:
    done = launched(tmp_path, *[models if word == "URL" else word for word in arguments])
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert re.search(said, done.stderr), done.stderr

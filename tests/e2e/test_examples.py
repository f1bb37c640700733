"""Every script of examples/ runs against Quill and prints what its page promises; the files beside them are valid."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.cli.test_deployment import parsed
from tests.e2e.live import LiveServer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(file.name for file in EXAMPLES.glob("*.py"))
# What each prints, as one pattern.
PRINTED = {
    "openai_chat.py": r"quill: (.+)\nstreamed: \1\n",
    "anthropic_messages.py": r"\d+ tokens in, \d+ out: (.+)\nstreamed: \1\n",
    "tools.py": r"get_weather\('(Bern|Zürich)'\) = 12 °C in \1\n.+\n",
    "structured.py": r"['\"].*['\"] is \d+\nIt was a (man|woman|ghost)\n",
    "embeddings.py": r"0\.\d+  The ship sailed at dawn\.\n0\.\d+  .+\n0\.\d+  .+\n",
    "batch.py": r"completed: 3 of 3\n(story-\d: .+\n){3}",
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("examples")
    command = ["-m", "quire.cli", "serve", "quill", "--port", "0", "--threads", "1", "--num-kv-blocks", "512",
               "--chat-template", str(EXAMPLES / "hermes.jinja"), "--batch-dir", str(folder / "batches")]  # fmt: skip
    with LiveServer(command, folder / "log") as server:
        yield server.url


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs(
    name: str, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_URL", url)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.fullmatch(PRINTED[name], printed, re.DOTALL), printed


def test_the_gateways_example_answers(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (EXAMPLES / "gateway" / "gateway.toml").read_text()
    file = tmp_path / "gateway.toml"
    file.write_text(re.sub(r"http://127\.0\.0\.1:800[12]", url, text.replace("port = 8080", "port = 0")))
    command = ["-m", "quire.cli", "gateway", "--config", str(file)]
    with LiveServer(command, tmp_path / "log", ready=r"gateway +on (\S+),") as gateway:
        monkeypatch.setenv("QUIRE_URL", gateway.url)
        monkeypatch.setenv("QUIRE_KEY", "change-me")
        runpy.run_path(str(EXAMPLES / "openai_chat.py"), run_name="__main__")


def test_the_compose_file_starts_what_exists() -> None:
    services = yaml.safe_load((EXAMPLES / "compose" / "compose.yaml").read_text())["services"]
    command = services["quire"]["command"]
    assert parsed(command)["api_key"]
    build = services["quire"]["build"]
    root = (EXAMPLES / "compose" / build["context"]).resolve()
    assert (root / build["dockerfile"]).exists()
    port = command[command.index("--port") + 1]
    assert services["quire"]["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_the_compose_file_of_disaggregation_starts_what_exists() -> None:
    folder = EXAMPLES / "disaggregation"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    prefill, decode = (parsed(services[name]["command"]) for name in ("prefill", "decode"))
    port = prefill["kv_share"].split(":")[1]
    assert decode["kv_peers"] == f"prefill:{port}"
    backends = tomllib.loads((folder / "gateway.toml").read_text())["backends"]
    assert {backend["url"]: backend["role"] for backend in backends} == {
        "http://prefill:8000": "prefill",
        "http://decode:8000": "decode",
    }


def test_the_page_lists_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    assert re.findall(r"^\| `([\w/.]+)` \|", page, re.MULTILINE) == [
        *(
            "openai_chat.py",
            "anthropic_messages.py",
            "tools.py",
            "structured.py",
            "embeddings.py",
            "batch.py",
        ),
        *("gateway/", "disaggregation/", "compose/"),
    ]
    assert set(SCRIPTS) == set(PRINTED)

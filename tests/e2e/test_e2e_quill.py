"""What a new user does: `quire serve` with nothing else, then the line that it prints, then OpenAI's client."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.e2e.live import LiveServer

from quire.errors import ModelLoadError
from quire.models.hub import quill_path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    try:
        quill_path("quill")
    except ModelLoadError as error:
        pytest.skip(str(error))
    log = tmp_path_factory.mktemp("quill") / "log"
    command = ["-m", "quire.cli", "serve", "--port", "0", "--threads", "1"]
    with LiveServer(command, log) as live:
        yield live
        assert live.stop() == 0, live.log.read_text()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_the_line_that_serve_prints_answers(server: LiveServer, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    printed = server.log.read_text()
    found = re.search(r"^ *(curl .*?'\{.*?\}')$", printed, re.MULTILINE | re.DOTALL)
    assert found, printed
    done = subprocess.run(
        ["bash", "-c", "exec " + found[1] + " -sS --fail"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    body = json.loads(done.stdout)
    assert body["choices"][0]["message"]["content"]
    assert body["determinism"] == "exact"
    assert body["model"] == "quill"


@pytest.mark.parametrize("temperature", [0, 1])
def test_stream_equals_whole(client: openai.OpenAI, temperature: int) -> None:
    messages: Any = [
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": [{"type": "text", "text": "Tell me of the sea."}]},
        {"role": "assistant", "content": "The sea was calm."},
        {"role": "user", "content": "Go on, “please” — élan 🙂"},
    ]
    asked: dict[str, Any] = {
        "model": "quill",
        "messages": messages,
        "seed": 3,
        "temperature": temperature,
        "max_tokens": 32,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    parts = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True)]
    assert "".join(p.delta.content or "" for p in parts) == whole.message.content
    assert parts[-1].finish_reason == whole.finish_reason
    assert whole.message.content


def test_the_context_is_the_models(client: openai.OpenAI) -> None:
    card = client.models.retrieve("quill")
    assert card.max_model_len == 8192  # type: ignore[attr-defined]

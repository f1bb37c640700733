"""Thinking budgets through a live server whose vocabulary has marks of reasoning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.e2e.live import LiveServer

from quire.models.hub import quill_path

# The answer begins inside of its reasoning, as with Qwen3 and DeepSeek.
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}<think>"
END_OF_REASONING = 6  # </think> in Quill's vocabulary


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Quill's tokenizer, which has marks of reasoning, and one layer of random weights."""
    folder = tmp_path_factory.mktemp("thinker")
    source = quill_path("quill")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder / name)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": 1, "max_position_embeddings": 512})
    )
    (folder / "chat.jinja").write_text(TEMPLATE)
    command = ["-m", "quire.cli", "serve", str(folder), "--load-format", "random", "--port", "0", "--threads", "1",
               "--chat-template", str(folder / "chat.jinja"), "--tool-format", "reasoning",
               "--num-kv-blocks", "256", "--served-model-name", "tiny"]  # fmt: skip
    with LiveServer(command, folder / "log") as live:
        yield live


def post(server: LiveServer, path: str, **fields: Any) -> Any:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Once"}], "seed": 4, "temperature": 1.0}
    answer = httpx.post(server.url + path, json={**body, "max_tokens": 60, **fields}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def test_reasoning_ends_at_its_budget_and_the_answer_follows(thinker: LiveServer) -> None:
    path, asked = "/v1/chat/completions", {"return_token_ids": True, "ignore_eos": True, "n": 2}
    free = post(thinker, path, **asked).json()["choices"]
    for budget in (0, 1, 7, 30):
        for choice, unlimited in zip(
            post(thinker, path, **asked, thinking_token_budget=budget).json()["choices"], free, strict=True
        ):
            ids = choice["token_ids"]
            assert ids[:budget] == unlimited["token_ids"][:budget], "up to there nothing is different"
            assert ids[budget] == END_OF_REASONING
            assert len(ids) == 60
            assert choice["message"]["content"]
    low = post(thinker, path, **asked, reasoning_effort="none").json()["choices"]
    assert [c["token_ids"][0] for c in low] == [END_OF_REASONING] * 2


def test_streams_and_messages_keep_it_too(thinker: LiveServer) -> None:
    whole = post(thinker, "/v1/chat/completions", thinking_token_budget=9).json()["choices"][0]["message"]
    text = post(thinker, "/v1/chat/completions", thinking_token_budget=9, stream=True).text
    deltas = [
        json.loads(line[6:])["choices"][0]["delta"]
        for line in text.splitlines()
        if line.startswith("data: {")
    ]
    for name in ("content", "reasoning"):
        assert "".join(d.get(name) or "" for d in deltas) == whole[name]
    blocks = post(thinker, "/v1/messages", thinking={"type": "enabled", "budget_tokens": 9}).json()["content"]
    assert [b["type"] for b in blocks] == ["thinking", "text"]
    assert blocks[0]["thinking"] == whole["reasoning"]
    assert blocks[1]["text"] == whole["content"]

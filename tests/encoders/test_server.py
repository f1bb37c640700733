"""A server of an encoder: the request that its start prints is answered, and conversations are refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from tests.e2e.live import LiveServer
from tests.encoders.tiny import save_family

pytestmark = pytest.mark.system


@pytest.mark.parametrize(
    ("kind", "path", "holds"),
    [("mpnet", "/v1/embeddings", "data"), ("bert_classifier", "/v1/rerank", "results")],
)
def test_the_request_that_the_start_prints_is_answered(
    kind: str, path: str, holds: str, tmp_path: Path
) -> None:
    save_family(kind, tmp_path / "model")
    command = ["-m", "quire.cli", "serve", str(tmp_path / "model"), "--port", "0", "--served-model-name", "tiny",
               "--threads", "1"]  # fmt: skip
    with LiveServer(command, tmp_path / "log") as server:
        printed = server.log.read_text()
        found = re.search(r"curl (\S+) .*?-d '(\{.*?\})'$", printed, re.MULTILINE | re.DOTALL)
        assert found, printed
        assert found[1] == server.url + path
        assert "cache" not in printed
        answer = httpx.post(
            found[1], content=found[2], headers={"content-type": "application/json"}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()[holds]
        for chat in ("/v1/chat/completions", "/v1/messages"):
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            refused = httpx.post(server.url + chat, json=body, timeout=60)
            assert refused.status_code == 400
            assert "which writes no text" in refused.json()["error"]["message"]
        assert server.stop() == 0

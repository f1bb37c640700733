"""A live server with a real model, which the attacks of this folder share; each leaves it working."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from tests.e2e.live import LiveServer

COMMAND = ["-m", "quire.cli", "serve", "quill", "--port", "0", "--threads", "1"]
TINY = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="session")
def quill(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """``quire serve quill``; at the end SIGTERM ends it with status 0."""
    folder = tmp_path_factory.mktemp("quill")
    with LiveServer([*COMMAND, "--batch-dir", str(folder / "batches")], folder / "log") as live:
        yield live
        assert live.stop() == 0, live.log.read_text()


@pytest.fixture
def server(quill: LiveServer) -> Iterator[LiveServer]:
    """The server; after the test it still answers, and holds nothing of the test's requests."""
    yield quill
    answer = httpx.post(quill.url + "/v1/completions", json=TINY, timeout=60)
    assert answer.status_code == 200, answer.text
    assert quill.metric("vllm:num_requests_running") == 0

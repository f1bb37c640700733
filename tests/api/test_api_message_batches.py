"""Anthropic's batches of messages, with its own client: results, pages, cancelling, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anthropic
import pytest
from tests.api.asgi_client import Api
from tests.api.fake_frontend import ANSWER
from tests.api.test_api_batches import begin, connected, line
from tests.api.test_api_server import server


def asked(custom_id: str, **params: Any) -> Any:
    given = {"max_tokens": 64, "messages": [{"role": "user", "content": "hi"}], "model": "tiny", **params}
    return {"custom_id": custom_id, "params": given}


def claude(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="x", max_retries=0)


def ended(client: anthropic.Anthropic, batch_id: str) -> Any:
    deadline = time.monotonic() + 60.0
    while (batch := client.messages.batches.retrieve(batch_id)).processing_status != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def test_a_batch_of_messages_has_results(tmp_path: Path) -> None:
    with server("0", "1", "", str(tmp_path)) as (_, url), claude(url) as client, connected(url) as gpt:
        batch = client.messages.batches.create(requests=[asked("a"), asked("b", temperature=-1), asked("c")])
        assert batch.processing_status in ("in_progress", "ended")
        assert sum(batch.request_counts.model_dump().values()) in (0, 3)
        batch = ended(client, batch.id)
        counts = batch.request_counts
        assert (counts.succeeded, counts.errored, counts.processing) == (2, 1, 0)
        results = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
        assert {name: result.type for name, result in results.items()} == {
            "a": "succeeded",
            "b": "errored",
            "c": "succeeded",
        }
        assert results["a"].message.content[0].text == ANSWER
        assert "temperature" in results["b"].error.error.message
        # The two kinds do not see each other.
        other = begin(gpt, line("a"))
        assert [one.id for one in client.messages.batches.list()] == [batch.id]
        assert [one.id for one in gpt.batches.list()] == [other.id]
        with pytest.raises(anthropic.NotFoundError):
            client.messages.batches.retrieve("msg" + other.id)


def test_a_batch_of_messages_can_be_cancelled(tmp_path: Path) -> None:
    with server("200", "1", "", str(tmp_path)) as (_, url), claude(url) as client:
        batch = client.messages.batches.create(requests=[asked(f"r{i}") for i in range(4)])
        with pytest.raises(anthropic.AnthropicError, match="results"):
            client.messages.batches.results(batch.id)
        assert client.messages.batches.cancel(batch.id).cancel_initiated_at is not None
        counts = ended(client, batch.id).request_counts
        assert counts.canceled == 4 - counts.succeeded
        kinds = [one.result.type for one in client.messages.batches.results(batch.id)]
        assert kinds.count("canceled") == counts.canceled >= 1
        assert client.messages.batches.cancel(batch.id).processing_status == "ended"


def test_batches_of_messages_come_in_pages(tmp_path: Path) -> None:
    with server("0", "1", "", str(tmp_path)) as (_, url), claude(url) as client:
        ids = [client.messages.batches.create(requests=[asked("a")]).id for _ in range(3)][::-1]
        page = client.messages.batches.list(limit=2)
        assert ([one.id for one in page.data], page.has_more) == (ids[:2], True)
        assert [one.id for one in page] == ids
        before = client.messages.batches.list(limit=1, before_id=ids[2])
        assert ([one.id for one in before.data], before.has_more) == ([ids[1]], True)
        with pytest.raises(anthropic.BadRequestError, match="limit"):
            client.messages.batches.list(limit=0)


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "requests"),
        ([{"custom_id": "a"}], "params"),
        ([asked("a"), asked("a")], "requests[1]: custom_id is used twice"),
        ([asked("a", stream=True)], "params.stream"),
        ([asked("")], "custom_id"),
        ([5], "requests"),
    ],
)
def test_a_wrong_batch_is_refused_at_once(requests: Any, words: str, tmp_path: Path) -> None:
    api = Api(batch_dir=str(tmp_path))
    answer = api.post("/v1/messages/batches", {"requests": requests})
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error"
    assert words in answer.json()["error"]["message"]
    assert api.call("GET", "/v1/files").json()["data"] == []


def test_batches_of_messages_need_a_folder() -> None:
    answer = Api().call("GET", "/v1/messages/batches")
    assert answer.status_code == 404
    assert "--batch-dir" in answer.json()["error"]["message"]

"""A batch through a real engine: every endpoint, with the tokens of the same requests online."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pytest
from tests.e2e.asking import PROMPT
from tests.e2e.live import LiveServer

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 24, "temperature": 1.0, "return_token_ids": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 24},
    "/v1/embeddings": {"input": PROMPT},
}


@pytest.mark.parametrize("endpoint", BODIES)
def test_a_batch_has_the_answers_of_the_endpoint(
    server: LiveServer, client: openai.OpenAI, endpoint: Any
) -> None:
    body = {"model": "tiny", **BODIES[endpoint]}
    if endpoint != "/v1/embeddings":
        body["seed"] = 9
    online = httpx.post(server.url + endpoint, json=body)
    assert online.status_code == 200, online.text
    lines = [{"custom_id": str(i), "method": "POST", "url": endpoint, "body": body} for i in range(12)]
    data = "\n".join(map(json.dumps, lines)).encode()
    made = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=made.id, endpoint=endpoint, completion_window="24h")
    with httpx.Client(base_url=server.admin_url) as admin:
        deadline = time.monotonic() + 60
        priorities = set[int]()
        while batch.status not in ("completed", "failed"):
            assert time.monotonic() < deadline, batch
            priorities |= {r["priority"] for r in admin.get("/requests").json()["data"]}
            batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch.errors
    assert priorities <= {2**31 - 1}
    assert batch.output_file_id is not None
    rows = [json.loads(row) for row in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(row["custom_id"] for row in rows) == sorted(str(i) for i in range(12))
    for row in rows:
        assert row["response"]["status_code"] == 200
        assert told(endpoint, row["response"]["body"]) == told(endpoint, online.json())


def told(endpoint: str, answer: dict[str, Any]) -> Any:
    """What an answer says, without ids and times."""
    if endpoint == "/v1/responses":
        return [[part["text"] for part in item["content"]] for item in answer["output"]]
    return answer["data"] if "data" in answer else answer["choices"]

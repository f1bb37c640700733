"""Seeded junk in known fields: a refusal in the client's form or an answer; no 5xx, no hang, no request left behind."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from tests.api.asgi_client import Api
from tests.api.fake_frontend import FakeFrontend, say

from quire.api.dialects.anthropic.request import CountTokensRequest, MessagesRequest
from quire.api.dialects.openai.fields import ChatRequest, CompletionRequest
from quire.api.dialects.responses.request import ResponsesRequest
from quire.http.field_rules import Table, field_table

NUM_REQUESTS = 300
STRINGS = ["", "a", "user", "system", "text", "tiny", "\u0000", "🙂", "0", "true", "json_object", "x" * 300]
NUMBERS = [0, 1, -1, 2, 16, 0.5, 1.5, -0.0, 1e308, -1e308, 2**31, 2**63, 2**64, 10**40, 255, 256, 257]


def junk(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 4 else 4)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice(STRINGS)
    if kind in (2, 3):
        return rng.choice(NUMBERS)
    if kind in (4, 5):
        return [junk(rng, depth + 1) for _ in range(rng.randrange(4))]
    keys = [
        *STRINGS,
        "role",
        "content",
        "type",
        "text",
        "tool_calls",
        "function",
        "arguments",
        "include_usage",
    ]
    return {rng.choice(keys): junk(rng, depth + 1) for _ in range(rng.randrange(4))}


def body_of(rng: random.Random, table: Table, start: dict[str, Any]) -> Any:
    if rng.random() < 0.02:
        return junk(rng)
    body = dict(start) if rng.random() < 0.9 else {}
    for name in rng.sample(sorted(table), rng.randrange(4)):
        body[name] = junk(rng)
    if isinstance(body.get("messages"), list) and rng.random() < 0.2:
        body["messages"] = [
            *body["messages"],
            {"role": "assistant", "content": junk(rng), "tool_calls": junk(rng)},
        ]
    return body


@pytest.mark.parametrize("seed", [1, 2])
def test_junk(seed: int) -> None:
    rng = random.Random(seed)
    api = Api(FakeFrontend(lambda *_: say("ok")))
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    ends = [
        ("/v1/chat/completions", ChatRequest, chat),
        ("/v1/completions", CompletionRequest, {"prompt": "hi", "max_tokens": 3}),
        ("/v1/messages", MessagesRequest, chat),
        ("/v1/messages/count_tokens", CountTokensRequest, {"messages": chat["messages"]}),
        ("/v1/responses", ResponsesRequest, {"input": "hi", "max_output_tokens": 3}),
    ]

    async def go() -> dict[int, int]:
        counts: dict[int, int] = {}
        transport = httpx.ASGITransport(app=api.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for i in range(NUM_REQUESTS):
                path, model, start = rng.choice(ends)
                raw = json.dumps(body_of(rng, field_table(model), start)).encode()
                answer = await asyncio.wait_for(
                    client.post(path, content=raw, headers={"content-type": "application/json"}), 10
                )
                said = f"seed {seed}, request {i}: {raw!r} -> {answer.status_code} {answer.text}"
                assert answer.status_code in (200, 400, 404), said
                form = {"message", "type"} if "messages" in path else {"message", "type", "param", "code"}
                assert answer.status_code == 200 or set(answer.json()["error"]) == form, said
                assert len(answer.text) < 2000 or answer.status_code == 200, said
                counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
        return counts

    counts = asyncio.run(go())
    print(f"seed {seed}: {counts}")
    assert counts[200] > NUM_REQUESTS // 10
    assert counts[400] > NUM_REQUESTS // 4
    assert api.frontend.num_requests == 0

"""deadline_ms and timing through live servers, on every endpoint that has them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from tests.e2e.asking import PROMPT, ask
from tests.e2e.live import LiveServer

LONG: dict[str, Any] = {"max_tokens": 450, "ignore_eos": True, "temperature": 1.0, "seed": 5, "n": 2}
BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, **LONG}


def test_a_missed_total_delivers_what_was_made(
    server: LiveServer, client: openai.OpenAI, is_real: bool
) -> None:
    whole = ask(client, chat=False, stream=False, **LONG)
    total = 60 if is_real else 300
    for stream in (False, True):
        late = ask(client, chat=False, stream=stream, **LONG, deadline_ms={"total": total})
        for got, full in zip(late, whole, strict=True):
            assert got.finish_reason == "deadline"
            assert (
                f"deadline_ms.total = {total} has passed after {len(got.token_ids)} output tokens"
                in got.stop_reason
            )
            assert 0 < len(got.token_ids) < 450
            assert full.token_ids[: len(got.token_ids)] == got.token_ids
    answer = httpx.post(server.url + "/v1/messages", json={
        "model": "tiny", "max_tokens": 450, "messages": [{"role": "user", "content": PROMPT}], "deadline_ms": total,
        "seed": 5, "timing": True,
    }).json()  # fmt: skip
    assert answer["stop_reason"] in ("deadline", "end_turn")
    assert answer["timing"]["seed"] == 5


def test_before_the_first_token_a_deadline_is_an_error(server: LiveServer) -> None:
    missed = httpx.post(server.url + "/v1/completions", json={**BODY, "deadline_ms": 0.01})
    assert missed.status_code == 504
    assert missed.json()["error"]["code"] == "deadline_exceeded"
    with httpx.stream(
        "POST", server.url + "/v1/completions", json={**BODY, "stream": True}, timeout=60
    ) as busy:
        lines = busy.iter_lines()
        for _ in range(20):
            next(lines)
        for stream in (False, True):
            refused = httpx.post(server.url + "/v1/completions",
                                 json={**BODY, "stream": stream, "deadline_ms": {"first_token": 0.01}})  # fmt: skip
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "deadline_hopeless"
            assert int(refused.headers["retry-after"]) >= 1


@pytest.mark.parametrize("stop", [None, "e"])
def test_timing_says_the_same_streamed_or_not(server: LiveServer, stop: str | None) -> None:
    body = {
        "model": "tiny",
        "prompt": PROMPT * 3,
        "max_tokens": 12,
        "seed": 3,
        "timing": True,
        "cache_salt": str(stop),
    }
    body |= {"stop": [stop]} if stop else {"ignore_eos": True}
    blocks = []
    for i, stream in enumerate((False, True, True)):
        sent = {**body, "stream": stream, **({"stream_options": {"include_usage": True}} if i == 2 else {})}
        text = httpx.post(server.url + "/v1/completions", json=sent).text
        last = text if not stream else text.split("data: ")[-2]
        blocks.append(json.loads(last)["timing"])
    first, *others = blocks
    assert first["cache_miss"] == "not in the cache"
    assert first["cached_tokens"] == 0
    for block in others:
        assert block["cache_miss"] is None
        assert block["cached_tokens"] > 0
    for block in blocks:
        assert block["seed"] == 3
        assert block["determinism"] == "exact"
        assert block["preemptions"] == 0
        assert block["chunks"] == 1
        assert block["steps"] == block["completion_tokens"]
        assert 0 <= block["queued_ms"] <= block["first_token_ms"] <= block["total_ms"]
        assert 0 < block["engine_s"] * 1e3 <= block["total_ms"] - block["queued_ms"] + 1.0
        assert block["kv_block_s"] > 0
        assert block["prefill_ms"] == pytest.approx(block["first_token_ms"] - block["queued_ms"], abs=0.01)


def test_timing_on_every_endpoint(server: LiveServer) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    asked = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 4},
        "/v1/messages": {"messages": messages, "max_tokens": 4},
        "/v1/responses": {"input": PROMPT, "max_output_tokens": 4},
        "/v1/completions": {"prompt": [PROMPT, "a"], "max_tokens": 4},
    }
    for path, body in asked.items():
        for stream in (False, True):
            said = httpx.post(
                server.url + path, json={"model": "tiny", "timing": True, "stream": stream, **body}
            )
            assert said.status_code == 200
            assert said.text.count('"timing":') == 1, (path, stream)
        assert '"timing":' not in httpx.post(server.url + path, json={"model": "tiny", **body}).text


def test_timing_says_where_a_prompt_leaves_the_cache(server: LiveServer) -> None:
    """A chat whose third message changes, and a text that goes on; other salts are not compared."""

    def cache_of(second: str, *more: str, salt: str = "m") -> dict[str, object] | None:
        contents = [PROMPT * 2, "I see.", second, *more]
        messages = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
        body = {"model": "tiny", "messages": messages, "max_tokens": 4, "timing": True, "cache_salt": salt}
        timing = httpx.post(server.url + "/v1/chat/completions", json=body).json()["timing"]
        reason: dict[str, object] | None = timing["cache"]["miss_reason"]
        assert reason is None or timing["cached_tokens"] <= reason["token"] < timing["prompt_tokens"]
        return reason

    long = "Once there was a hare that had a house. " * 3
    first = cache_of(long + "A" + long)
    assert first is not None
    assert (first["reason"], first["token"], first["message"]) == ("unseen", 0, 0)
    changed = cache_of(long + "B" + long)
    assert changed is not None
    assert (changed["reason"], changed["message"]) == ("changed", 2)
    assert str(changed["text"]).strip().startswith("B")
    assert cache_of(long + "B" + long) is None
    other = cache_of(long + "C" + long, salt="n")
    assert other is not None
    assert other["reason"] == "unseen"
    texts = {"model": "tiny", "max_tokens": 1, "timing": True, "cache_salt": "t"}
    for text, reason in ((long.strip(), "unseen"), ((long * 2).strip(), "appended")):
        block = httpx.post(server.url + "/v1/completions", json={**texts, "prompt": text}).json()["timing"]
        assert block["cache"]["miss_reason"]["reason"] == reason
        assert block["cache"]["miss_reason"]["message"] is None

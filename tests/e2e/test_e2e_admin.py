"""The admin surface of a live server, while requests run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from tests.e2e.asking import PROMPT, ask
from tests.e2e.live import LiveServer

LONG: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True, "temperature": 1.0, "seed": 11}


@pytest.fixture
def admin(server: LiveServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.admin_url, timeout=30) as client:
        yield client
        client.post("/undrain")


def streamed(client: openai.OpenAI) -> Any:
    known = {k: v for k, v in LONG.items() if k != "ignore_eos"}
    return client.completions.create(
        model="tiny", prompt=PROMPT, stream=True, extra_body={"ignore_eos": True}, **known
    )


def test_settings_change_while_requests_run(client: openai.OpenAI, admin: httpx.Client) -> None:
    before = admin.get("/runtime").json()["runtime"]
    (alone,) = ask(client, chat=False, stream=False, **LONG)
    stream = streamed(client)
    text = next(stream).choices[0].text
    changed = admin.patch("/runtime", json={"max_num_seqs": 1, "order": "priority", "gate": "static"}).json()
    assert changed["changed"]["max_num_seqs"] == {"old": before["max_num_seqs"], "new": 1}
    assert admin.get("/runtime").json()["runtime"] == changed["runtime"] != before
    assert text + "".join(chunk.choices[0].text for chunk in stream) == alone.text
    refused = admin.patch("/runtime", json={"max_num_seqs": 10**6})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "max_num_seqs"
    assert admin.patch("/runtime", json=before).json()["runtime"] == before


def test_the_prefix_cache_is_reset_while_a_request_reads_it(
    client: openai.OpenAI, admin: httpx.Client
) -> None:
    prompt = PROMPT + " called Lily. She liked to play outside in the sun and in the rain."
    (alone,) = ask(client, chat=False, stream=False, prompt=prompt, **LONG)
    stream = client.completions.create(
        model="tiny", prompt=prompt, stream=True, extra_body={"ignore_eos": True}, max_tokens=150, seed=11,
        temperature=1.0,
    )  # fmt: skip
    text = next(stream).choices[0].text
    assert admin.post("/reset_prefix_cache").json()["num_freed_blocks"] >= 0
    assert text + "".join(chunk.choices[0].text for chunk in stream) == alone.text
    admin.post("/reset_prefix_cache")
    (fresh,) = ask(client, chat=False, stream=False, prompt=prompt, **LONG)
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0
    assert fresh.text == alone.text


def test_drain_lets_the_running_request_end(client: openai.OpenAI, admin: httpx.Client) -> None:
    stream = streamed(client)
    next(stream)
    assert admin.post("/drain").json()["state"] == "draining"
    with pytest.raises(openai.InternalServerError) as refused:
        ask(client, chat=True, stream=False, max_tokens=4)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    deadline = time.monotonic() + 60
    while not admin.get("/drain").json()["drained"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert admin.post("/undrain").json()["state"] == "ready"
    assert ask(client, chat=True, stream=False, max_tokens=4)[0].finish_reason


def test_cancel_frees_the_blocks(server: LiveServer, client: openai.OpenAI, admin: httpx.Client) -> None:
    stream = streamed(client)
    first = next(stream)
    (one,) = admin.get("/requests").json()["data"]
    assert one["id"] == first.id
    assert admin.post(f"/requests/{first.id}/cancel").json()["cancelled"] == 1
    with pytest.raises(openai.APIError, match="cancelled by an operator"):
        list(stream)
    deadline = time.monotonic() + 60
    while server.metric("vllm:num_requests_running") or server.metric("vllm:kv_cache_usage_perc"):
        assert time.monotonic() < deadline
        time.sleep(0.02)

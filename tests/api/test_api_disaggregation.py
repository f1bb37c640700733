"""The two calls of a prompt that one engine computes and another answers, in vLLM's words."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.api.asgi_client import Api, error_of

from quire.config import CacheConfig
from quire.request import KvTerms

SHARED = CacheConfig(64, tiers=(("10.0.0.7:9500", 1 << 20),), engine_id="e" * 32)
# As vLLM's example of a proxy sends it.
FIRST = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
PROMPT = "It was a dark and stormy night, and the rain fell."  # 50 tokens


@pytest.fixture
def api() -> Api:
    return Api(shared_cache=SHARED)


def ask(api: Api, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
    prompt = (
        {"prompt": PROMPT}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": PROMPT}]}
    )
    return api.call("POST", path, json={"model": "tiny", **prompt, **fields})


def kv_of(api: Api) -> KvTerms | None:
    return api.frontend.submitted[-1].stream.output.request.terms.kv


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_answer_of_the_first_call_has_the_params_of_the_second(api: Api, path: str) -> None:
    fields = {
        "n": 2,
        "max_tokens": 40,
        "min_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = ask(api, path, kv_transfer_params=FIRST, **fields).raise_for_status().json()
    submitted = api.frontend.submitted[-1]
    assert submitted.stream.output.request.sampling.max_tokens == 0
    assert submitted.stream.output.request.sampling.n == 1
    assert kv_of(api) == KvTerms(gives=True)
    assert answer["usage"]["completion_tokens"] == 0
    num_blocks = answer["usage"]["prompt_tokens"] // 16
    assert num_blocks >= 3
    assert answer["kv_transfer_params"] == {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": SHARED.engine_id,
        "remote_block_ids": list(range(num_blocks)), "remote_host": "10.0.0.7", "remote_port": 9500,
    }  # fmt: skip
    again = ask(api, path, kv_transfer_params=answer["kv_transfer_params"], max_tokens=3, timing=True)
    assert kv_of(api) == KvTerms(engine_id=SHARED.engine_id, num_tokens=16 * num_blocks)
    assert again.json()["timing"]["prefill_remote_tokens"] == 0
    assert "kv_transfer_params" not in again.json()


def test_a_second_call_may_be_a_stream(api: Api) -> None:
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": "a",
        "remote_block_ids": [0, 1],
        "max_load_tokens": 16,
    }
    answer = ask(api, kv_transfer_params=params, stream=True)
    assert answer.text.rstrip().endswith("[DONE]")
    assert kv_of(api) == KvTerms(engine_id="a", num_tokens=32, max_load_tokens=16)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ([1], "kv_transfer_params"),
        ({"do_remote_decode": True, "do_remote_prefill": True}, "kv_transfer_params"),
        ({"do_remote_decode": 1}, "kv_transfer_params.do_remote_decode"),
        ({"remote_block_ids": ["a"]}, "kv_transfer_params.remote_block_ids"),
        ({"max_load_tokens": -1}, "kv_transfer_params.max_load_tokens"),
        ({"remote_engine": "a"}, "kv_transfer_params.remote_engine"),
    ],
)
def test_params_that_are_wrong_are_refused(api: Api, params: Any, param: str) -> None:
    assert error_of(ask(api, kv_transfer_params=params), 400)["param"].startswith(param)
    assert not api.frontend.submitted


def test_a_first_call_is_for_one_prompt(api: Api) -> None:
    answer = api.call(
        "POST", "/v1/completions", json={"model": "tiny", "prompt": ["a", "b"], "kv_transfer_params": FIRST}
    )
    assert error_of(answer, 400)["param"] == "kv_transfer_params"


@pytest.mark.parametrize("params", [None, {}])
def test_params_that_ask_for_nothing_change_nothing(api: Api, params: Any) -> None:
    assert ask(api, kv_transfer_params=params).status_code == 200
    assert kv_of(api) is None


def test_an_engine_that_shares_nothing_refuses_them() -> None:
    assert error_of(ask(Api(), kv_transfer_params=FIRST), 400)["param"] == "kv_transfer_params"

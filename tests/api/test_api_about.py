"""The page at / and what clients of vLLM and llama.cpp ask of a server."""

from __future__ import annotations

import re

import pytest
from tests.api.asgi_client import Api
from tests.api.fake_frontend import TEMPLATE


def test_the_page_has_the_model_and_a_request_to_try() -> None:
    page = Api().call("GET", "/")
    assert page.headers["content-type"].startswith("text/html")
    for words in ("tiny, alias", "ready", "curl http://test/v1/chat/completions", 'href="/metrics"'):
        assert words in page.text
    assert Api().call("HEAD", "/").status_code == 200


def test_with_keys_the_page_has_the_name_alone() -> None:
    page = Api(api_keys=("k",)).call("GET", "/")
    assert page.status_code == 200
    assert "Quire" in page.text
    assert "tiny" not in page.text
    assert Api(api_keys=("k",)).call("GET", "/props").status_code == 401


def test_the_tokenizer_and_the_properties_are_told() -> None:
    info = Api().call("GET", "/tokenizer_info").json()
    assert (info["eos_token"], info["chat_template"]) == ("<|end|>", TEMPLATE)
    assert (info["model_max_length"], info["vocab_size"]) == (256, 257)
    props = Api().call("GET", "/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 256
    assert props["default_generation_settings"]["params"]["temperature"] == 0.5
    assert (props["chat_template"], props["total_slots"]) == (TEMPLATE, 1)


def test_slots_are_the_running_requests() -> None:
    (free,) = Api().call("GET", "/slots").json()
    assert (free["id"], free["is_processing"], free["n_ctx"]) == (0, False, 256)

    class Running:
        owner = ""

        async def cancel(self) -> None:
            raise AssertionError("a slot is only read")

        def describe(self, now_s: float) -> dict[str, object]:
            return {"id": "chatcmpl-1", "prompt_tokens": 3, "completion_tokens": 2}

    api = Api()
    api.app.state.quire.running["a"] = frozenset({"a"}), Running()
    (slot,) = api.call("GET", "/slots").json()
    assert slot["is_processing"]
    assert (slot["id_task"], slot["n_prompt_tokens"], slot["next_token"]) == (
        "chatcmpl-1",
        3,
        {"n_decoded": 2},
    )


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1", True),
        ("https://[::1]:8443", True),
        ("http://localhost.evil.example", False),
        ("http://evil.example", False),
    ],
)
def test_pages_of_this_machine_may_call_by_default(origin: str, allowed: bool) -> None:
    response = Api().call("GET", "/v1/models", headers={"origin": origin})
    assert (response.headers.get("access-control-allow-origin") == origin) is allowed
    asked = Api(cors_origins=("http://good",)).call("GET", "/v1/models", headers={"origin": origin})
    assert "access-control-allow-origin" not in asked.headers
    none = Api(cors_origins=("none",)).call("GET", "/v1/models", headers={"origin": origin})
    assert "access-control-allow-origin" not in none.headers


def test_the_page_of_the_api_loads_nothing_from_elsewhere() -> None:
    page = Api(api_keys=("k",)).call("GET", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "fetch('/openapi.json'" in page.text
    assert not re.findall(r'(?:src|href)="(?!/)|https?://|innerHTML|@import', page.text)
    assert "tiny" not in page.text

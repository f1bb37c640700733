"""/tokenize, /detokenize, the rendering of chats, echo and truncate_prompt_tokens."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.asgi_client import Api, error_of, events
from tests.api.fake_frontend import ANSWER, END

CHAT = [{"role": "user", "content": "hi"}]


def test_a_prompt_becomes_ids_and_text_again() -> None:
    api = Api()
    body = api.post("/tokenize", {"model": "tiny", "prompt": "hé", "add_special_tokens": False}).json()
    assert body == {"count": 3, "max_model_len": 256, "tokens": list("hé".encode()), "token_strs": None}
    back = api.post("/detokenize", {"tokens": [*body["tokens"], END]}).json()
    assert back == {"prompt": "hé<|end|>"}
    with_special = api.post("/tokenize", {"prompt": "a", "return_token_strs": True}).json()
    assert with_special["tokens"] == [END, 97]
    assert with_special["token_strs"] == ["<|end|>", "a"]


def test_messages_are_rendered() -> None:
    api = Api()
    body = api.post("/tokenize", {"messages": CHAT, "add_generation_prompt": False}).json()
    assert body["tokens"] == list(b"<user>hi")
    assert api.frontend.rendered[-1][1] == {"add_generation_prompt": False}


def test_render_gives_what_the_engine_would_get() -> None:
    api = Api()
    body = api.post("/v1/chat/completions/render", {"messages": CHAT, "temperature": 0}).json()
    assert body["prompt"] == "<user>hi"
    api.chat(messages=CHAT)
    (submitted,) = api.frontend.submitted  # rendering ran nothing
    assert body["prompt_token_ids"] == submitted.prompt == list(b"<user>hi")
    error = error_of(api.post("/v1/chat/completions/render", {"messages": CHAT, "temperature": "x"}), 400)
    assert error["param"] == "temperature"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": "a", "documents": []}, "documents"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"promt": "a"}, "promt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 257]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
def test_bad_bodies_name_the_field(path: str, body: dict[str, Any], param: str) -> None:
    assert error_of(Api().post(path, body), 400)["param"] == param


def test_an_unknown_model_is_404() -> None:
    assert error_of(Api().post("/tokenize", {"model": "other", "prompt": "a"}), 404)["param"] == "model"


def test_echo_begins_each_choice_with_its_prompt() -> None:
    body = Api().complete(prompt=["one ", list(b"two ")], echo=True, n=2).json()
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == ["one " + ANSWER, f"one {ANSWER} 1", "two " + ANSWER, f"two {ANSWER} 1"]
    parts: dict[int, str] = {}
    for chunk in events(Api().complete(prompt=["one ", list(b"two ")], echo=True, n=2, stream=True)):
        for choice in chunk["choices"]:
            parts[choice["index"]] = parts.get(choice["index"], "") + choice["text"]
    assert [parts[i] for i in range(4)] == texts


def test_truncation_keeps_the_end_and_says_so() -> None:
    api = Api()
    body = api.complete(prompt="abcdef", truncate_prompt_tokens=2, echo=True).json()
    assert api.frontend.submitted[-1].prompt == list(b"ef")
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["prompt_tokens_details"]["truncated_tokens"] == 5  # one of them is the fake's BOS
    assert body["choices"][0]["text"] == "ef" + ANSWER
    whole = api.complete(prompt="abcdef", truncate_prompt_tokens=100).json()
    assert api.frontend.submitted[-1].prompt == "abcdef"
    assert "truncated_tokens" not in whole["usage"]["prompt_tokens_details"]
    api.complete(prompt=[97] * 1000, truncate_prompt_tokens=-1, max_tokens=6)
    assert len(api.frontend.submitted[-1].prompt) == 250
    api.chat(messages=[{"role": "user", "content": "x" * 50}], truncate_prompt_tokens=4)
    assert len(api.frontend.submitted[-1].prompt) == 4
    for wrong in (0, 257, -2):
        assert error_of(api.complete(truncate_prompt_tokens=wrong), 400)["param"] == "truncate_prompt_tokens"

"""``prompt_logprobs`` on both endpoints, and ``echo`` with log-probabilities, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.api.asgi_client import Api, events
from tests.api.fake_frontend import ANSWER


def entry(token: str, rank: int = 1, logprob: float = -0.25) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": token}


EXPECTED = [
    None,
    {"98": entry("b"), "99": entry("c", 2, -1.25)},
    {"99": entry("c"), "100": entry("d", 2, -1.25)},
    {"100": entry("d"), "101": entry("e", 2, -1.25)},
]


def test_completions_have_them_in_each_choice() -> None:
    fields: dict[str, Any] = {"prompt": ["abcd", "xy"], "n": 2, "prompt_logprobs": 2}
    body = Api().complete(**fields).json()
    assert [c["prompt_logprobs"] for c in body["choices"][:2]] == [EXPECTED, EXPECTED]
    assert [len(c["prompt_logprobs"]) for c in body["choices"]] == [4, 4, 2, 2]
    streamed: dict[int, list[Any]] = {i: [] for i in range(4)}
    for chunk in events(Api().complete(**fields, stream=True)):
        for choice in chunk["choices"]:
            if "prompt_logprobs" in choice:
                streamed[choice["index"]].append(choice["prompt_logprobs"])
    assert [streamed[i] for i in range(4)] == [[c["prompt_logprobs"]] for c in body["choices"]]


@pytest.mark.parametrize("stream", [False, True])
def test_chats_have_them_once_beside_the_choices(stream: bool) -> None:
    response = Api().chat(prompt_logprobs=0, n=2, stream=stream)
    chunks = events(response) if stream else [response.json()]
    ((found),) = [c["prompt_logprobs"] for c in chunks if "prompt_logprobs" in c]
    text = "<user>hi"
    assert found == [None, *({str(ord(c)): entry(c)} for c in text[1:])]
    assert "prompt_logprobs" not in Api().chat().json()


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(stream: bool) -> None:
    response = Api().complete(prompt="abcd", echo=True, logprobs=1, stream=stream)
    chunks = events(response) if stream else [response.json()]
    choices = [c for chunk in chunks for c in chunk["choices"]]
    assert "".join(c["text"] for c in choices) == "abcd" + ANSWER
    lists = [c["logprobs"] for c in choices if c["logprobs"]]
    tokens = [t for one in lists for t in one["tokens"]]
    assert tokens[:5] == ["a", "b", "c", "d", "H"]
    assert [p for one in lists for p in one["token_logprobs"]][:5] == [None, -0.25, -0.25, -0.25, -0.25]
    assert [p for one in lists for p in one["top_logprobs"]][:3] == [None, {"b": -0.25}, {"c": -0.25}]
    offsets = [p for one in lists for p in one["text_offset"]]
    assert offsets[:6] == [0, 1, 2, 3, 4, 5]
    assert all("prompt_logprobs" not in c for c in choices)


def test_echo_and_prompt_logprobs_each_have_their_own_number() -> None:
    for num_echo, num_prompt in ((0, 3), (3, 0)):
        api = Api()
        (choice,) = api.complete(
            prompt="abcd", echo=True, logprobs=num_echo, prompt_logprobs=num_prompt
        ).json()["choices"]
        assert api.frontend.submitted[0].sampling.prompt_logprobs == 3
        assert len(choice["prompt_logprobs"][1]) == max(1, num_prompt)
        assert len(choice["logprobs"]["top_logprobs"][1]) == max(1, num_echo)


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_alone(stream: bool) -> None:
    """lm-evaluation-harness and others score a text so: echo, logprobs, no answer."""
    response = Api().complete(prompt=["abcd", "x"], echo=True, logprobs=0, max_tokens=0, stream=stream)
    chunks = events(response) if stream else [response.json()]
    texts, tokens, reasons = ["", ""], [[], []], [None, None]  # type: ignore[var-annotated]
    for choice in (c for chunk in chunks for c in chunk["choices"]):
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += choice["logprobs"]["tokens"] if choice["logprobs"] else []
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == ["abcd", "x"]
    assert tokens == [list("abcd"), ["x"]]
    assert reasons == ["length", "length"]
    echoed = Api().complete(prompt="abcd", echo=True, max_tokens=0).json()
    assert [c["text"] for c in echoed["choices"]] == ["abcd"]
    assert echoed["usage"]["completion_tokens"] == 0

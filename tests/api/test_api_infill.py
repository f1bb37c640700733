"""``suffix`` of completions and of Ollama's texts, and llama.cpp's ``/infill``."""

from __future__ import annotations

import pytest
from tests.api.asgi_client import Api, error_of
from tests.api.fake_frontend import ANSWER, FakeFrontend
from tests.text.test_infill import with_tokens

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
PROMPT = [257, *b"def f(", 258, *b"return 1", 259]


def coder() -> Api:
    frontend = FakeFrontend()
    frontend.tokenizer = with_tokens(*MARKS)
    frontend.model = type(frontend.model)(("tiny",), 256, 261, (256,))
    return Api(frontend)


def test_a_suffix_is_behind_the_prompt() -> None:
    api = coder()
    answer = api.complete(prompt="def f(", suffix="return 1", stop_token_ids=[5]).json()
    assert answer["choices"][0]["text"] == ANSWER
    submitted = api.frontend.submitted[-1]
    assert list(submitted.prompt) == PROMPT
    assert submitted.sampling.stop_token_ids == (5, 260)
    api.complete(prompt=[[*b"def f("], "x"], suffix="return 1")
    assert list(api.frontend.submitted[-2].prompt) == PROMPT
    assert error_of(api.complete(suffix="x", echo=True), 400)["param"] == "echo"
    assert api.complete(suffix="").status_code == 200


def test_ollamas_texts_take_a_suffix() -> None:
    api = coder()
    body = {"prompt": "def f(", "suffix": "return 1", "stream": False}
    assert api.post("/api/generate", body).json()["response"] == ANSWER
    assert list(api.frontend.submitted[-1].prompt) == PROMPT
    assert "insert" in api.post("/api/show", {"model": "tiny"}).json()["capabilities"]


@pytest.mark.parametrize(
    ("body", "before", "behind"),
    [
        ({"input_prefix": "def f(", "input_suffix": "return 1"}, b"def f(", b"return 1"),
        ({"input_suffix": "return 1"}, b"", b"return 1"),
        ({"input_prefix": "def f("}, b"def f(", b"\n"),
        ({"prompt": "def f("}, b"def f(", b"\n"),
        ({"input_prefix": "a\n", "prompt": "b", "input_extra": [{"filename": "x.py", "text": "c"}]},
         b"x.py\nc\na\nb", b"\n"),
        ({}, b"", b"\n"),
    ],
    ids=["both", "suffix alone", "prefix alone", "line alone", "another file", "nothing"],
)  # fmt: skip
def test_infill_needs_no_field(body: dict[str, object], before: bytes, behind: bytes) -> None:
    api = coder()
    answer = api.post("/infill", body).json()
    assert (answer["content"], answer["stop"]) == (ANSWER, True)
    submitted = api.frontend.submitted[-1]
    assert list(submitted.prompt) == [257, *before, 258, *behind, 259]
    assert submitted.sampling.stop_token_ids == (260,)
    assert submitted.sampling.max_tokens is None


def test_a_model_without_the_tokens_refuses_a_suffix() -> None:
    assert error_of(Api().complete(suffix="x"), 400)["param"] == "suffix"
    answer = Api().post("/api/generate", {"prompt": "a", "suffix": "x"})
    assert "filling in the middle" in answer.json()["error"]

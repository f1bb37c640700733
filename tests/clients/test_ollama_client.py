"""Ollama's own Python client against a server: what it puts together from lines is the answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.test_api_clients import WRITTEN
from tests.e2e.live import LiveServer

ollama: Any = pytest.importorskip("ollama", reason="pip install ollama")
pytestmark = pytest.mark.slow


def get(city: str) -> str:
    """Tell the weather.

    Args:
        city: where
    """
    return f"Rain in {city}."


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    log = tmp_path_factory.mktemp("fake") / "log"
    with LiveServer(["-m", "tests.api.serve_fake", "0", "5", WRITTEN], Path(log)) as live:
        client = ollama.Client(host=live.url)
        yield client
        client.close()


def test_a_chat_with_tools_goes_on_after_a_call(client: Any) -> None:
    turns: list[Any] = [{"role": "user", "content": "Weather?"}]
    whole = client.chat("tiny", messages=turns, tools=[get], think=True)
    assert whole.message.thinking == "Hm."
    assert whole.message.content == "Sure, 🙂."
    first, _ = whole.message.tool_calls
    assert get(**first.function.arguments) == "Rain in Zürich."
    streamed = list(client.chat("tiny", messages=turns, tools=[get], think=True, stream=True))
    assert "".join(part.message.content for part in streamed) == whole.message.content
    assert [call.function for part in streamed for call in part.message.tool_calls or ()] == [
        call.function for call in whole.message.tool_calls
    ]
    assert (streamed[-1].done_reason, streamed[-1].eval_count) == (whole.done_reason, whole.eval_count)
    turns += [whole.message, {"role": "tool", "tool_name": "get", "content": "Rain."}]
    assert client.chat("tiny", messages=turns, tools=[get]).prompt_eval_count > whole.prompt_eval_count


def test_texts_go_on_with_their_context(client: Any) -> None:
    first = client.generate("tiny:latest", "Hello", options={"num_predict": 9, "seed": 1})
    assert (first.eval_count, first.done_reason) == (9, "length")
    second = client.generate("tiny", "More", context=first.context)
    assert second.prompt_eval_count > len(first.context)
    assert client.generate("tiny").done_reason == "load"


def test_vectors_and_models_are_read(client: Any) -> None:
    assert len(client.embed("tiny", ["a", "b"]).embeddings) == 2
    assert client.embeddings("tiny", "a").embedding
    (model, _) = client.list().models
    assert model.model == "tiny:latest"
    assert client.show(model.model).capabilities == ["completion", "tools", "thinking"]
    assert client.ps().models[0].context_length == 1024
    assert client.pull("tiny").status == "success"


def test_refusals_are_its_errors(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="quire pull"):
        client.pull("llama3.2")
    with pytest.raises(ollama.ResponseError, match="not served here"):
        client.chat("llama3.2", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(ollama.ResponseError, match=r"options\.temperature"):
        client.generate("tiny", "hi", options={"temperature": -1})

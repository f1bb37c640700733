"""Messages and responses through a real engine process: the tokens of a chat completion, streamed as whole."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest
from tests.e2e.asking import PROMPT
from tests.e2e.live import LiveServer

MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
SEEDED = {"seed": 5, "temperature": 1.0}


@pytest.fixture
def chat_text(client: openai.OpenAI) -> str:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=16, seed=5, temperature=1.0
    )
    assert answer.choices[0].message.content
    return answer.choices[0].message.content


def test_messages_are_the_chat(server: LiveServer, chat_text: str) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 16, "messages": MESSAGES, "extra_body": SEEDED}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as claude:
        whole = claude.messages.create(**asked)
        with claude.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
        count = claude.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens
    for message in (whole, streamed):
        (block,) = message.content
        assert block.type == "text"
        assert block.text == chat_text
        assert message.usage.output_tokens == 16
        assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == count
        assert message.stop_reason == "max_tokens"


def test_responses_are_the_chat(client: openai.OpenAI, chat_text: str) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "input": PROMPT, "max_output_tokens": 16, "temperature": 1.0, "extra_body": {"seed": 5},
    }  # fmt: skip
    whole = client.responses.create(**asked)
    assert whole.output_text == chat_text
    assert whole.status == "incomplete"
    text = ""
    for event in client.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == chat_text
    # The conversation of an answer, continued, is the same as sent in full.
    after = {**asked, "input": "And then?"}
    by_id = client.responses.create(**{**after, "previous_response_id": whole.id})
    history: list[Any] = [
        *MESSAGES, {"role": "assistant", "content": chat_text}, {"role": "user", "content": "And then?"},
    ]  # fmt: skip
    in_full = client.responses.create(**{**after, "input": history})
    assert by_id.output_text == in_full.output_text
    assert client.responses.retrieve(by_id.id).output_text == by_id.output_text

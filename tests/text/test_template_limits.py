"""A template cannot leave the sandbox, and its output is capped. Time and memory: tests/engine/test_prompts.py."""

from __future__ import annotations

from datetime import datetime

import pytest

from quire.errors import RequestError
from quire.text import chat_template
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import SpecialTokens

ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__closure__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{% set ns = namespace(__class__=1) %}{{ ns.__class__ }}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{{ messages | map(attribute='__class__') | list | first | attr('mro') }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_python_is_out_of_reach(source: str) -> None:
    template = ChatTemplate({"default": source}, SpecialTokens(), datetime.now)
    try:
        text = template.render([{"role": "user"}])
    except RequestError:
        return
    assert text == "", "an unsafe attribute is undefined, and prints nothing"


def test_ordinary_long_conversations_are_well_within_the_limits() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content | trim }}{% else %}<|bot|>{{ m.content }}"
        "{% endif %}{% if loop.last %}end{% endif %}{% endfor %}"
    )
    messages = [
        {"role": "user", "content": "word " * 200},
        {"role": "assistant", "content": "word " * 200},
    ] * 2000
    text = ChatTemplate({"default": source}, SpecialTokens(), datetime.now).render(messages)
    assert len(text) > 3_900_000


def test_output_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_OUTPUT_CHARS", 100_000)
    source = "{% for a in range(99999) %}{{ loop.length }}{% endfor %}"
    with pytest.raises(RequestError, match=r"chat template.*longer than 100000 characters") as caught:
        ChatTemplate({"default": source}, SpecialTokens(), datetime.now).render([])
    assert caught.value.param == "messages"

"""Asking through OpenAI's client, whole or streamed, with the answer in one form."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import openai

PROMPT = "Once upon a time, there was a little girl"


@dataclass
class Answer:
    """One choice, and the usage of the whole answer."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: Any = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)  # chat: entries of content; completions: tuples
    usage: Any = None


def ask(
    client: openai.OpenAI, *, chat: bool, stream: bool, prompt: str = PROMPT, **fields: Any
) -> list[Answer]:
    """Return the choices in order of index. ``fields`` beyond OpenAI's go into the body."""
    create: Any = client.chat.completions.create if chat else client.completions.create
    known = {
        "n",
        "seed",
        "stop",
        "temperature",
        "top_p",
        "max_tokens",
        "logprobs",
        "top_logprobs",
        "logit_bias",
    }
    body = {"return_token_ids": True, **{k: v for k, v in fields.items() if k not in known}}
    given = {k: v for k, v in fields.items() if k in known}
    given |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    if not stream:
        whole = create(model="tiny", extra_body=body, **given)
        return [_add(Answer(usage=whole.usage), c, chat=chat, delta=False) for c in whole.choices]
    answers: dict[int, Answer] = {}
    usage = None
    for chunk in create(
        model="tiny", extra_body=body, stream=True, stream_options={"include_usage": True}, **given
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            _add(answers.setdefault(choice.index, Answer()), choice, chat=chat, delta=True)
    for answer in answers.values():
        answer.usage = usage
    return [answers[i] for i in sorted(answers)]


def _add(answer: Answer, choice: Any, *, chat: bool, delta: bool) -> Answer:
    if chat:
        answer.text += (choice.delta.content if delta else choice.message.content) or ""
        answer.logprobs += choice.logprobs.content if choice.logprobs else []
    else:
        answer.text += choice.text
        p = choice.logprobs
        if p:
            answer.logprobs += zip(p.tokens, p.token_logprobs, p.top_logprobs, p.text_offset, strict=True)
    answer.finish_reason = choice.finish_reason or answer.finish_reason
    answer.stop_reason = getattr(choice, "stop_reason", None) or answer.stop_reason
    answer.token_ids += getattr(choice, "token_ids", None) or []
    return answer

"""lm-eval's models for completions and chats, with the tokenizer that the server offers; no data set is downloaded."""

from __future__ import annotations

from typing import Any

from check import QUILL, check
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI


def asked(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)  # type: ignore[arg-type]


def completions() -> Any:
    return LocalCompletionsAPI(
        model="quill", base_url=QUILL + "/v1/completions", tokenizer_backend="remote", num_concurrent=2,
        max_length=2048,
    )  # fmt: skip


@check("log-likelihoods of continuations; a likelier one scores higher")
def _() -> None:
    pairs = [("The ship sailed across the", " sea"), ("The ship sailed across the", " spoon")]
    (likely, _), (unlikely, _) = completions().loglikelihood([asked("loglikelihood", *p) for p in pairs])
    assert unlikely < likely < 0


@check("log-likelihood of a whole text, in windows")
def _() -> None:
    (score,) = completions().loglikelihood_rolling(
        [asked("loglikelihood_rolling", "It was a dark night. " * 4)]
    )
    assert float(score[0] if isinstance(score, tuple) else score) < 0


@check("texts until a stop string")
def _() -> None:
    until = {"until": ["."], "max_gen_toks": 24}
    (text,) = completions().generate_until([asked("generate_until", "Once upon a time", until)])
    assert "." not in text


@check("chats")
def _() -> None:
    chat = LocalChatCompletion(
        model="quill", base_url=QUILL + "/v1/chat/completions", tokenizer_backend=None, num_concurrent=1
    )
    messages = chat.apply_chat_template([{"role": "user", "content": "Tell me a story."}])
    (text,) = chat.generate_until(
        [asked("generate_until", messages, {"until": ["\n\n\n"], "max_gen_toks": 16})]
    )
    assert text

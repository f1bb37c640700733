"""``/tokenize``, ``/detokenize`` (vLLM's forms) and ``/v1/chat/completions/render``: prompts that are not run."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from pydantic import Field

from quire.api.dialects.openai.chat import chat_conversation, chat_job
from quire.api.dialects.openai.fields import ChatPrompt
from quire.api.history_parts import sight_of
from quire.api.job import served_name
from quire.api.state import ApiState
from quire.engine.large_body import json_in_pieces
from quire.engine.prompts import off_loop
from quire.errors import RequestError, clip
from quire.http.call import Call
from quire.http.wire import Boolean, Text, TokenIds, Wire, parse


class TokenizeRequest(ChatPrompt):
    """Body of ``/tokenize``: a ``prompt``, or ``messages`` that the chat template renders."""

    model: Text | None = None
    prompt: Text | None = None
    # Only here may messages be absent.
    messages: Annotated[list[Any] | None, Field(description="a list of messages")] = None  # type: ignore[assignment]
    add_special_tokens: Boolean | None = None
    return_token_strs: Boolean = False


class DetokenizeRequest(Wire):
    """Body of ``/detokenize``."""

    model: Text | None = None
    tokens: TokenIds


async def tokenize(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> dict[str, Any]:
    """Return ``{count, max_model_len, tokens, token_strs}``.

    Raises:
        RequestError: neither or both of prompt and messages, or a field that belongs to the other.
    """
    request = parse(TokenizeRequest, body, ignored=ignored)
    served_name(state, request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("Send either prompt (a string) or messages (a list), one of them.", param="prompt")
    if request.prompt is not None:
        for name in ChatPrompt.model_fields:
            if name != "messages" and getattr(request, name) is not None:
                raise RequestError(f"{name} is only allowed with messages.", param=name)
        special = request.add_special_tokens is not False
        ids = await state.frontend.prompts.tokenize(request.prompt, add_special_tokens=special)
    else:
        special = request.add_special_tokens is True
        conversation = await off_loop(
            len(request.messages or ()),
            chat_conversation,
            request,
            ignored,
            None,
            sight_of(state, call, request),
        )
        _, ids = await conversation.prompt(state, add_special_tokens=special)
        ids = tuple(ids)  # without the images
    tokenizer = state.frontend.tokenizer
    strings: msgspec.Raw | None = None
    if request.return_token_strs:
        strings = await json_in_pieces(ids, lambda token_id: tokenizer.id_to_token(token_id) or "")
    return {
        "count": len(ids),
        "max_model_len": state.model.max_model_len,
        "tokens": await json_in_pieces(ids),
        "token_strs": strings,
    }


async def detokenize(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> dict[str, Any]:
    """Return ``{prompt}``: the text of the ids, special tokens included.

    Raises:
        RequestError: names the first id outside the vocabulary.
    """
    request = parse(DetokenizeRequest, body, ignored=ignored)
    served_name(state, request.model)
    size = state.model.vocab_size
    if request.tokens and (min(request.tokens) < 0 or max(request.tokens) >= size):
        i, token_id = next((i, t) for i, t in enumerate(request.tokens) if not 0 <= t < size)
        raise RequestError(
            f"tokens[{i}] = {clip(token_id)} is not allowed: token ids of this model are 0…{size - 1}.",
            param=f"tokens[{i}]",
        )
    decode = partial(state.frontend.tokenizer.decode, request.tokens, skip_special_tokens=False)
    return {"prompt": await off_loop(len(request.tokens), decode)}


async def render(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> dict[str, Any]:
    """Check a whole chat completion and return its prompt as text and ids, as the engine would get them."""
    job = await chat_job(state, call, body, ignored)
    ids = job.prompts[0]
    assert not isinstance(ids, str)
    return {
        "object": "chat.completion.render",
        "model": job.answer.head.model,
        "prompt": job.prompt_text,
        "prompt_token_ids": list(ids),
        "count": len(ids),
        "max_model_len": state.model.max_model_len,
    }

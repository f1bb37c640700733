"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``, by way of a chat completion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.api import anthropic_fields as tables
from quire.api.anthropic_answer import MessageAnswer
from quire.api.anthropic_prompt import chat_fields, effort_of
from quire.api.anthropic_protocol import CountTokensRequest, MessagesRequest, Metadata
from quire.api.chat import chat_prompt, chat_work
from quire.api.generation import Job
from quire.api.identity import new_head
from quire.api.protocol import ChatRequest, parse
from quire.api.state import ApiState
from quire.api.tools import tool_use
from quire.errors import RequestError

# Fields that a chat completion has under the same name.
_SAME_NAME = (
    "max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "min_p", "repetition_penalty", "priority",
    "cache_salt", "request_id", "deadline_ms", "timing",
)  # fmt: skip
# What a chat completion's errors call a field → what the client called it.
_RENAMED = (
    ("thinking_token_budget", "thinking.budget_tokens"),
    ("reasoning_effort", "output_config.effort"),
    ("response_format.json_schema.schema", "output_config.format.schema"),
    ("response_format", "output_config.format"),
    (".function.parameters", ".input_schema"),
    (".function.name", ".name"),
)


async def messages_job(state: ApiState, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of a message and render its prompt.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(MessagesRequest, body, tables.MESSAGES, ignored=ignored)
    fields = chat_fields(request, ignored)
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            fields[name] = value
    if request.stop_sequences:
        fields["stop"] = request.stop_sequences
    if request.metadata is not None:
        metadata = parse(Metadata, request.metadata, tables.METADATA, prefix="metadata.", ignored=ignored)
        fields["user"] = metadata.user_id
    try:
        work = await chat_work(state, ChatRequest(**fields), ignored, effort=effort_of(request))
    except RequestError as error:
        raise _renamed(error) from None
    form = work.sampling.structured_outputs
    if form is not None:  # the engine names it, too
        named = replace(form, param=_rename(form.param))
        work = replace(work, sampling=replace(work.sampling, structured_outputs=named))
    head = new_head(state, "msg_", work.model)
    return work.job(MessageAnswer(head, work.plan, state.new_id, streamed=request.stream))


async def count_tokens(state: ApiState, body: Any, ignored: list[str] | None) -> dict[str, int]:
    """Return ``{input_tokens}``: the length of the prompt that the same fields make in ``/v1/messages``.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(CountTokensRequest, body, tables.COUNT_TOKENS, ignored=ignored)
    chat = ChatRequest(**chat_fields(request, ignored))
    state.check_model(chat.model)
    try:
        use = tool_use(chat.tools, chat.tool_choice, chat.parallel_tool_calls, ignored)
        text = chat_prompt(state, chat, ignored, use)
    except RequestError as error:
        raise _renamed(error) from None
    return {"input_tokens": len(await state.frontend.tokenize(text, add_special_tokens=False))}


def _renamed(error: RequestError) -> RequestError:
    """The same error in the words of Anthropic's API."""
    message, param = _rename(str(error)), error.param and _rename(error.param)
    if param == "stop":
        message, param = message.replace("stop", "stop_sequences", 1), "stop_sequences"
    return type(error)(message, param=param, code=error.code)


def _rename(text: str) -> str:
    for theirs, ours in _RENAMED:
        text = text.replace(theirs, ours)
    return text

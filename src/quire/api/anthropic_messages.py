"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``, by way of a chat completion."""

from __future__ import annotations

from typing import Any

from quire.api.anthropic_answer import MessageAnswer
from quire.api.anthropic_prompt import chat_fields, effort_of
from quire.api.anthropic_protocol import CountTokensRequest, MessagesRequest, Metadata
from quire.api.chat import chat_prompt
from quire.api.job import Job
from quire.api.protocol import ChatRequest
from quire.api.replies import new_head
from quire.api.state import ApiState
from quire.api.tools import tool_use
from quire.api.translated import Words
from quire.http.wire import parse

_WORDS = Words(
    (
        ("thinking_token_budget", "thinking.budget_tokens"),
        ("reasoning_effort", "output_config.effort"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("response_format", "output_config.format"),
        (".function.parameters", ".input_schema"),
        (".function.name", ".name"),
    ),
    whole=(("stop", "stop_sequences"),),
)


async def messages_job(state: ApiState, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of a message and render its prompt.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(MessagesRequest, body, ignored=ignored)
    fields = chat_fields(request, ignored) | request.given() | {"max_tokens": request.max_tokens}
    if request.stop_sequences:
        fields["stop"] = request.stop_sequences
    if request.metadata is not None:
        metadata = parse(Metadata, request.metadata, prefix="metadata.", ignored=ignored)
        fields["user"] = metadata.user_id
    work = await _WORDS.work(state, ChatRequest(**fields), ignored, effort=effort_of(request))
    head = new_head(state, "msg_", work.model)
    return work.job(MessageAnswer(head, work.plan, state.new_id, streamed=request.stream))


async def count_tokens(state: ApiState, body: Any, ignored: list[str] | None) -> dict[str, int]:
    """Return ``{input_tokens}``: the length of the prompt that the same fields make in ``/v1/messages``.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(CountTokensRequest, body, ignored=ignored)
    chat = ChatRequest(**chat_fields(request, ignored))
    state.check_model(chat.model)
    with _WORDS.kept():
        use = tool_use(chat.tools, chat.tool_choice, chat.parallel_tool_calls, ignored)
        prompt = await chat_prompt(state, chat, ignored, use)
    return {"input_tokens": len(prompt.token_ids)}

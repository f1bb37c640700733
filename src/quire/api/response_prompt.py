"""From the items, tools and settings of OpenAI's Responses API to those of a chat completion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.api.anthropic_answer import arguments_of
from quire.api.protocol import text_of
from quire.api.response_protocol import (
    CallItem,
    FunctionTool,
    MessageItem,
    NamedChoice,
    OutputItem,
    Reasoning,
    ReasoningItem,
    ResponsesRequest,
    TextFormat,
    TextSettings,
)
from quire.api.translated import EFFORTS
from quire.errors import RequestError
from quire.http.wire import clip, parse

_TEXT_PARTS = ("input_text", "output_text", "text")
_THOUGHT_PARTS = ("reasoning_text", "summary_text", "text")
_ID_PREFIXES = {"message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "reasoning": "rs_"}


def chat_fields(request: ResponsesRequest, ignored: list[str] | None) -> dict[str, Any]:
    """Return what the request says beside its input and the `DrawingFields`, as fields of a `ChatRequest`.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    fields: dict[str, Any] = {
        "parallel_tool_calls": request.parallel_tool_calls,
        "max_completion_tokens": request.max_output_tokens,
        "chat_template_kwargs": request.chat_template_kwargs,
        "user": request.user,
    }
    if request.tools is not None:
        fields["tools"] = [_tool(tool, f"tools[{i}].", ignored) for i, tool in enumerate(request.tools)]
    choice: Any = request.tool_choice
    if isinstance(choice, dict):
        named = parse(NamedChoice, choice, prefix="tool_choice.", ignored=ignored)
        choice = {"type": "function", "function": {"name": named.name}}
    fields["tool_choice"] = choice
    if request.reasoning is not None:
        reasoning = parse(Reasoning, request.reasoning, prefix="reasoning.", ignored=ignored)
        fields["reasoning_effort"] = EFFORTS.get(reasoning.effort or "", reasoning.effort)
    if request.text is not None:
        text = parse(TextSettings, request.text, prefix="text.", ignored=ignored)
        if text.format is not None:
            fields["response_format"] = _format(text.format, ignored)
    return {name: value for name, value in fields.items() if value is not None}


def add_input(
    messages: list[dict[str, Any]], given: str | list[Any], ignored: list[str] | None = None
) -> None:
    """Append the messages of ``input`` to a conversation.

    What one answer consists of — reasoning, text, calls — is one message of the assistant to a chat template.

    Raises:
        RequestError: names ``input[i].…``, the value and what is allowed.
    """
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        return
    # The tool of each call so far, by the call's id.
    names = {c["id"]: c["function"]["name"] for message in messages for c in message.get("tool_calls", ())}
    for i, item in enumerate(given):
        where = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            _add_message(messages, item, where, ignored)
        elif kind == "function_call":
            names.update([_add_call(messages, item, where, ignored)])
        elif kind == "function_call_output":
            _add_output(messages, item, where, names, ignored)
        elif kind == "reasoning":
            _add_reasoning(messages, item, where, ignored)
        else:
            raise RequestError(
                f"{where} = {clip(item)} is not allowed: it must be an item of the types {', '.join(_ID_PREFIXES)}.",
                param=where,
                code="invalid_type" if not isinstance(kind, str) else "unsupported_content",
            )


def _add_message(messages: list[dict[str, Any]], raw: Any, where: str, ignored: list[str] | None) -> None:
    item = parse(MessageItem, raw, prefix=where + ".", ignored=ignored)
    text = text_of(item.content, where + ".content", _TEXT_PARTS, ignored)
    if item.role == "assistant":
        _assistant(messages, "content")["content"] = text
    else:
        messages.append({"role": item.role, "content": text})


def _add_call(
    messages: list[dict[str, Any]], raw: Any, where: str, ignored: list[str] | None
) -> tuple[str, str]:
    """Return the call's id and the name of its tool."""
    item = parse(CallItem, raw, prefix=where + ".", ignored=ignored)
    function = {"name": item.name, "arguments": arguments_of(item.arguments)}
    calls = _assistant(messages).setdefault("tool_calls", [])
    calls.append({"id": item.call_id, "type": "function", "function": function})
    return item.call_id, item.name


def _add_output(
    messages: list[dict[str, Any]], raw: Any, where: str, names: dict[str, str], ignored: list[str] | None
) -> None:
    item = parse(OutputItem, raw, prefix=where + ".", ignored=ignored)
    if item.call_id not in names:
        raise RequestError(
            f"{where}.call_id = {clip(item.call_id)} is the id of no function_call before it.",
            param=where + ".call_id",
        )
    text = text_of(item.output, where + ".output", _TEXT_PARTS, ignored)
    messages.append(
        {"role": "tool", "tool_call_id": item.call_id, "name": names[item.call_id], "content": text}
    )


def _add_reasoning(messages: list[dict[str, Any]], raw: Any, where: str, ignored: list[str] | None) -> None:
    item = parse(ReasoningItem, raw, prefix=where + ".", ignored=ignored)
    text = text_of(item.content, where + ".content", _THOUGHT_PARTS, ignored)
    text = text or text_of(item.summary, where + ".summary", _THOUGHT_PARTS, ignored)
    if text:
        _assistant(messages, "content", "tool_calls", "reasoning_content")["reasoning_content"] = text


def _assistant(messages: list[dict[str, Any]], *absent: str) -> dict[str, Any]:
    """The assistant's message to add to: the last one, or a new one where it has any of ``absent``."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) is not None for name in absent):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _tool(raw: Any, prefix: str, ignored: list[str] | None) -> dict[str, Any]:
    tool = parse(FunctionTool, raw, prefix=prefix, ignored=ignored)
    function = tool.model_dump(exclude_none=True, exclude={"type"})
    return {"type": "function", "function": function}


def _format(raw: Any, ignored: list[str] | None) -> dict[str, Any]:
    prefix = "text.format."
    form = parse(TextFormat, raw, prefix=prefix, ignored=ignored)
    schema = form.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    if form.type != "json_schema":
        for name in schema:
            raise RequestError(
                f"{prefix}{name} is only allowed with type 'json_schema', not with {form.type!r}.",
                param=prefix + name,
            )
        return {"type": form.type}
    return {"type": form.type, "json_schema": schema}


def input_items(given: str | list[Any], new_id: Callable[[], str]) -> list[dict[str, Any]]:
    """Return the checked ``input`` of a request (not what came before it) as items, texts as parts."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_with_id(item, new_id) for item in given]


def _with_id(item: dict[str, Any], new_id: Callable[[], str]) -> dict[str, Any]:
    kind = item.get("type", "message")
    named = {"type": kind, **item}
    if not named.get("id"):
        named["id"] = _ID_PREFIXES[kind] + new_id()
    named.setdefault("status", "completed")
    if kind == "message" and isinstance(named["content"], str):
        part = "output_text" if named["role"] == "assistant" else "input_text"
        named["content"] = [{"type": part, "text": named["content"]}]
    return named

"""Messages of a conversation: from the wire to what HF chat templates expect, text only."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.api import field_tables
from quire.api.fields import clip
from quire.api.protocol import Message, ToolCall, parse
from quire.errors import RequestError

SUPPORTED_PARTS = ("text",)
_PART_FIELDS = {"type", "text", "cache_control", "annotations"}  # the last two have no effect
# Fields that pass to the template as they are.
_PASSED = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")


def template_messages(messages: list[Any], ignored: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the messages as a chat template reads them: contents are strings, tool arguments are objects.

    ``ignored`` as in `quire.api.protocol.parse`.

    Raises:
        RequestError: names ``messages[i].…``, the value and what is allowed.
    """
    return [_message(message, f"messages[{i}]", ignored) for i, message in enumerate(messages)]


def _message(raw: Any, where: str, ignored: list[str] | None) -> dict[str, Any]:
    message = parse(Message, raw, field_tables.MESSAGE, prefix=where + ".", ignored=ignored)
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise RequestError(
            f"{where}.content is required: only an assistant message with tool_calls may leave it out.",
            param=where + ".content",
            code="missing_required_parameter",
        )
    if message.tool_calls and message.role != "assistant":
        raise RequestError(
            f"{where}.tool_calls is only allowed in an assistant message, not in one of {message.role!r}.",
            param=where + ".tool_calls",
        )
    result: dict[str, Any] = {"role": message.role, "content": _content(message.content, where + ".content")}
    for name in _PASSED:
        value = getattr(message, name)
        if value is not None:
            result[name] = value
    if message.tool_calls:
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    return result


def _content(content: Any, where: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where} = {clip(content)} is not allowed: it must be a string or a list of text parts.",
            param=where,
            code="invalid_type",
        )
    return "\n".join(_text_of_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _text_of_part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise RequestError(
            f'{where} = {clip(part)} is not allowed: it must be an object like {{"type": "text", "text": "…"}}.',
            param=where,
            code="invalid_type",
        )
    kind = part["type"]
    if kind not in SUPPORTED_PARTS:
        raise RequestError(
            f"{where} is a part of type {clip(kind)}, but the model is text only. Supported part types: "
            f"{', '.join(SUPPORTED_PARTS)}.",
            param=where,
            code="unsupported_content",
        )
    for name in part:
        if name not in _PART_FIELDS:
            raise RequestError(
                f"{where}.{name} is not allowed: a text part has the fields type and text.",
                param=f"{where}.{name}",
                code="unknown_parameter",
            )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(
            f"{where}.text = {clip(text)} is not allowed: it must be a string.",
            param=where + ".text",
            code="invalid_type",
        )
    return text


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    """OpenAI sends arguments as a string of JSON; HF templates expect the object."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments.encode() or b"{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise RequestError(
                f"{where}.function.arguments = {clip(call.function.arguments)} is not JSON: {error}.",
                param=where + ".function.arguments",
            ) from None
        if not isinstance(arguments, dict):
            raise RequestError(
                f"{where}.function.arguments = {clip(call.function.arguments)} must be a JSON object.",
                param=where + ".function.arguments",
            )
    result: dict[str, Any] = {
        "type": call.type,
        "function": {"name": call.function.name, "arguments": arguments},
    }
    if call.id is not None:
        result["id"] = call.id
    return result

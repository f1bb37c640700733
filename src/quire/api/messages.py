"""Messages of a conversation: from the wire to what HF chat templates expect, text only."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.api.protocol import Message, ToolCall, text_of
from quire.errors import RequestError
from quire.http.wire import clip, parse

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
    message = parse(Message, raw, prefix=where + ".", ignored=ignored)
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
    result: dict[str, Any] = {"role": message.role, "content": None}
    if message.content is not None:
        result["content"] = text_of(message.content, where + ".content", ignored=ignored)
    for name in _PASSED:
        value = getattr(message, name)
        if value is not None:
            result[name] = value
    if message.tool_calls:
        result["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    return result


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

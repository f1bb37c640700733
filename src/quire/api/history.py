"""`History`: messages that are not plain text (parts, reasoning, tool calls), as a chat template reads them."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from quire.api.fields import TextContent
from quire.api.template_input import call_message, parsed_arguments
from quire.errors import RequestError, clip
from quire.http.wire import AnyObject, Past, Text, parse

PARTS = "quire.api.history_parts"  # loaded with the first part that is no plain text


class FunctionCall(Past):
    """The function of a tool call in the history."""

    name: Text
    arguments: Annotated[str | dict[str, Any], Field(description="a string of JSON, or an object")] = "{}"


class ToolCall(Past):
    """A tool call of an assistant message in the history."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: AnyObject


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
ROLES: tuple[str, ...] = get_args(Role)


class Message(Past):
    """One message of a conversation."""

    role: Role
    content: TextContent | None = None
    name: Text | None = None
    tool_calls: Annotated[list[Any] | None, Field(description="a list of tool calls")] = None
    function_call: Annotated[
        dict[str, Any] | None, Field(description="an object with a name and arguments")
    ] = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    thinking: Text | None = None


class TextPart(Past):
    """A part of a content."""

    type: Text
    text: Text


def joined_text(
    content: str | list[Any],
    where: str,
    kinds: tuple[str, ...] = ("text",),
    ignored: list[str] | None = None,
    *,
    newest: bool = False,
    thoughts: list[str] | None = None,
    first: int = 0,
) -> str:
    """Return the text of a string, or of parts, joined by line breaks; parts of ``kinds`` are plain text.

    ``newest``: it is the newest message of the user (`quire.api.history_parts`). ``thoughts`` collects reasoning.
    ``first``: the place of the first part.

    Raises:
        RequestError: names the part of ``where``, and what is allowed.
    """
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content, first):
        place = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise RequestError(
                f"{place} = {clip(part)} is not allowed: it must be an object like "
                f'{{"type": "{kinds[0]}", "text": "…"}}.',
                param=place,
                code="invalid_type",
            )
        if kind in kinds:
            texts.append(parse(TextPart, part, prefix=place + ".", ignored=ignored).text)
            continue
        text, is_thought = import_module(PARTS).part_text(part, place, newest=newest)
        (thoughts if is_thought and thoughts is not None else texts).append(text)
    return "\n".join(texts)


# Fields of a message that pass to the template as they are.
_PASSED = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")


class History:
    """The messages of one request, of which some are not plain text: parts, reasoning, tool calls."""

    def __init__(self, messages: list[Any], ignored: list[str] | None, sight: Any = None) -> None:
        """``sight``: a `Sight`, if the model takes images."""
        self._messages = messages
        self._ignored = ignored
        self._sight = sight
        # The index of the user's newest message, once it matters.
        self._newest: int | None = None
        # The id of the latest call in the form of before tools, which has none of its own.
        self._call_id: str | None = None

    def read(self, message: Message, i: int) -> dict[str, Any]:
        """Return ``message``, the one with index ``i``, as a chat template reads it.

        Raises:
            RequestError: names ``messages[i].…``, the value and what is allowed.
        """
        where, ignored = f"messages[{i}]", self._ignored
        if self._newest is None and isinstance(message.content, list):
            self._newest = import_module(PARTS).newest_index(self._messages)
        if message.content is None and message.role != "assistant":
            raise RequestError(
                f"{where}.content is required: only an assistant message may leave it out.",
                param=where + ".content",
                code="missing_required_parameter",
            )
        calls = _calls(message, where, ignored) if message.tool_calls or message.function_call else []
        role = "tool" if message.role == "function" else message.role
        # Templates read a missing text as an empty one, or as the mark of a message that only calls.
        result: dict[str, Any] = {"role": role, "content": None if calls else ""}
        if isinstance(message.content, str):
            result["content"] = message.content
        elif message.content is not None:
            thoughts: list[str] = []
            of_parts = partial(joined_text, ignored=ignored, newest=i == self._newest, thoughts=thoughts)
            seen = None
            if self._sight is not None:
                seen = self._sight.parts(message.content, f"{where}.content", message.role, of_parts)
            result["content"] = of_parts(message.content, where + ".content") if seen is None else seen
            if any(thoughts):
                result["reasoning_content"] = "\n".join(thoughts)
        for name in _PASSED:
            if (value := getattr(message, name)) is not None:
                result[name] = value
        if calls:
            result["tool_calls"] = calls
        if message.role == "function" or message.function_call:
            self._name_call(result, i)
        return result

    def _name_call(self, result: dict[str, Any], i: int) -> None:
        """Give a function of before tools an id, or its result that of the latest: there is one call at a time."""
        if result["role"] == "tool":
            result.setdefault("tool_call_id", self._call_id)
        else:
            # Mistral's templates want 9 characters.
            self._call_id = result["tool_calls"][-1]["id"] = f"call{i:05}"


def _calls(message: Message, where: str, ignored: list[str] | None) -> list[dict[str, Any]]:
    """Return the calls of a message, as a chat template reads them."""
    for name in ("tool_calls", "function_call"):
        if getattr(message, name) and message.role != "assistant":
            raise RequestError(
                f"{where}.{name} is only allowed in an assistant message, not in one of {message.role!r}.",
                param=f"{where}.{name}",
            )
    calls = [
        _tool_call(call, f"{where}.tool_calls[{i}]", ignored)
        for i, call in enumerate(message.tool_calls or ())
    ]
    if message.function_call:
        calls.append(_call(message.function_call, None, where + ".function_call", ignored))
    return calls


def _tool_call(raw: Any, where: str, ignored: list[str] | None) -> dict[str, Any]:
    call = parse(ToolCall, raw, prefix=where + ".", ignored=ignored)
    return _call(call.function, call.id, where + ".function", ignored)


def _call(raw: Any, call_id: str | None, where: str, ignored: list[str] | None) -> dict[str, Any]:
    """OpenAI sends arguments as a string of JSON; HF templates expect the object."""
    function = parse(FunctionCall, raw, prefix=where + ".", ignored=ignored)
    arguments = function.arguments
    made = call_message(
        call_id, function.name, parsed_arguments(arguments) if isinstance(arguments, str) else arguments
    )
    if call_id is None:
        del made["id"]
    return made

"""OpenAI's Responses API: its wire models, and how they become a `Conversation`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from quire.api.answer_form import schema_form
from quire.api.conversation import Conversation
from quire.api.dialects.responses.tools import as_arguments, response_tool_use, visible
from quire.api.fields import EFFORTS, SampledFields, TextContent, Tools
from quire.api.history import joined_text
from quire.api.history_parts import content_of, newest_index, part_text
from quire.api.template_input import call_message, parsed_arguments, template_variables
from quire.api.thinking import Thinking
from quire.errors import RequestError, clip
from quire.http.wire import (
    AnyObject,
    AtLeastOne,
    Boolean,
    Integer,
    JsonSchema,
    Metadata,
    Past,
    Text,
    Texts,
    User,
    Wire,
    not_allowed,
    parse,
)
from quire.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:  # loaded with a model that takes images alone
    from quire.api.images import Sight

# What ``include`` may hold; reasoning is shown in plain text anyway.
INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
TEXT_PARTS = ("input_text", "output_text", "text")
THOUGHT_PARTS = ("reasoning_text", "summary_text", "text")
_ID_PREFIXES = {
    "message": "msg_", "function_call": "fc_", "function_call_output": "fco_", "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_", "reasoning": "rs_",
}  # fmt: skip


class ResponsesRequest(SampledFields):
    """Body of ``/v1/responses``."""

    input: Annotated[str | list[Any], Field(description="a string or a list of items")]
    instructions: Text | None = None
    previous_response_id: Text | None = None
    store: Boolean = True
    metadata: Metadata | None = None
    background: Boolean = False
    include: Texts | None = None
    top_logprobs: Integer | None = None
    tools: Tools | None = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, Field(description="'none', 'auto', 'required' or an object with a type")
    ] = None
    parallel_tool_calls: Boolean = True
    text: AnyObject | None = None
    reasoning: AnyObject | None = None
    max_output_tokens: AtLeastOne | None = None
    context_management: Annotated[list[Any] | None, Field(description="a list of objects")] = None
    user: User = ""
    chat_template_kwargs: AnyObject | None = None


class Reasoning(Wire):
    """``reasoning``."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class TextSettings(Wire):
    """``text``."""

    format: AnyObject | None = None


class TextFormat(Wire):
    """``text.format``."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    strict: Boolean | None = None


class MessageItem(Past):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: TextContent


class CallItem(Past):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    namespace: Text | None = None


class CustomCallItem(Past):
    """A call of a custom tool of an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    input: Text
    namespace: Text | None = None


class OutputItem(Past):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: TextContent


class ReasoningItem(Past):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: TextContent = ""
    content: TextContent = ""


def read_conversation(
    request: ResponsesRequest, messages: list[dict[str, Any]], ignored: list[str] | None
) -> Conversation:
    """Return the conversation of a response. ``messages``: those before its instructions, its input included.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    opening = [{"role": "system", "content": request.instructions}] if request.instructions else []
    reasoning = parse(Reasoning, request.reasoning or {}, prefix="reasoning.", ignored=ignored)
    effort = EFFORTS.get(reasoning.effort or "", reasoning.effort)
    return Conversation(
        opening + messages,
        response_tool_use(request.tools or (), request.tool_choice, request.parallel_tool_calls, ignored),
        template_variables(request.chat_template_kwargs, effort=effort),
        Thinking(effort=effort, effort_param="reasoning.effort"),
    )


def output_form(request: ResponsesRequest, ignored: list[str] | None) -> StructuredOutputsParams | None:
    """Return the form of the answer that ``text`` asks for; None for free text.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    raw = parse(TextSettings, request.text or {}, prefix="text.", ignored=ignored).format
    if raw is None:
        return None
    prefix = "text.format."
    form = parse(TextFormat, raw, prefix=prefix, ignored=ignored)
    schema = form.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    if form.type == "json_schema":
        return schema_form(schema, prefix, ignored)
    for name in schema:
        raise RequestError(
            f"{prefix}{name} is only allowed with type 'json_schema', not with {form.type!r}.",
            param=prefix + name,
        )
    return (
        StructuredOutputsParams(json_object=True, param="text.format") if form.type == "json_object" else None
    )


def add_input(
    messages: list[dict[str, Any]],
    items: str | list[Any],
    ignored: list[str] | None = None,
    sight: Sight | None = None,
) -> None:
    """Append the messages of ``input`` to a conversation. ``sight``: of a model that takes images.

    The items of one answer (reasoning, text, calls) become one message of the assistant.

    Raises:
        RequestError: names ``input[i].…``, the value and what is allowed.
    """
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
        return
    # The tool of each call so far, by the call's id.
    names = {c["id"]: c["function"]["name"] for message in messages for c in message.get("tool_calls", ())}
    newest = newest_index(items, kinds=(None, "message"))
    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            _add_message(messages, item, where, ignored, sight, newest=i == newest)
        elif kind in ("function_call", "custom_tool_call"):
            names.update([_add_call(messages, item, where, ignored)])
        elif kind in ("function_call_output", "custom_tool_call_output"):
            _add_output(messages, item, where, names, ignored, sight)
        elif kind == "reasoning":
            _add_reasoning(messages, item, where, ignored)
        elif isinstance(kind, str):  # a call of a tool of OpenAI's servers
            text = part_text(item, where, newest=False).text
            if text:
                _assistant(messages, "content", "tool_calls")["content"] = text
        else:
            raise not_allowed(where, item, f"an item like those of {', '.join(_ID_PREFIXES)}", "invalid_type")


def _add_message(
    messages: list[dict[str, Any]],
    raw: Any,
    where: str,
    ignored: list[str] | None,
    sight: Sight | None,
    *,
    newest: bool,
) -> None:
    item = parse(MessageItem, raw, prefix=where + ".", ignored=ignored)
    thoughts: list[str] = []
    read = partial(joined_text, kinds=TEXT_PARTS, ignored=ignored, newest=newest, thoughts=thoughts)
    text = content_of(item.content, where + ".content", item.role, sight, read)
    if item.role == "assistant":
        message = _assistant(messages, "content")
        message["content"] = text
        if any(thoughts):
            message.setdefault("reasoning_content", "\n".join(thoughts))
    else:
        messages.append({"role": item.role, "content": text})


def _add_call(
    messages: list[dict[str, Any]], raw: Any, where: str, ignored: list[str] | None
) -> tuple[str, str]:
    """Return the call's id and the name of its tool."""
    if raw["type"] == "custom_tool_call":
        custom = parse(CustomCallItem, raw, prefix=where + ".", ignored=ignored)
        call_id, name, arguments = custom.call_id, custom.name, as_arguments(custom.input)
        name = visible(name, custom.namespace)
    else:
        item = parse(CallItem, raw, prefix=where + ".", ignored=ignored)
        call_id, name, arguments = (
            item.call_id,
            visible(item.name, item.namespace),
            parsed_arguments(item.arguments),
        )
    calls = _assistant(messages).setdefault("tool_calls", [])
    calls.append(call_message(call_id, name, arguments))
    return call_id, name


def _add_output(
    messages: list[dict[str, Any]],
    raw: Any,
    where: str,
    names: dict[str, str],
    ignored: list[str] | None,
    sight: Sight | None,
) -> None:
    item = parse(OutputItem, raw, prefix=where + ".", ignored=ignored)
    if item.call_id not in names:
        raise RequestError(
            f"{where}.call_id = {clip(item.call_id)} does not match any earlier function_call.",
            param=where + ".call_id",
        )
    read = partial(joined_text, kinds=TEXT_PARTS, ignored=ignored)
    content = content_of(item.output, where + ".output", "tool", sight, read)
    messages.append(
        {"role": "tool", "tool_call_id": item.call_id, "name": names[item.call_id], "content": content}
    )


def _add_reasoning(messages: list[dict[str, Any]], raw: Any, where: str, ignored: list[str] | None) -> None:
    item = parse(ReasoningItem, raw, prefix=where + ".", ignored=ignored)
    text = joined_text(item.content, where + ".content", THOUGHT_PARTS, ignored)
    text = text or joined_text(item.summary, where + ".summary", THOUGHT_PARTS, ignored)
    if text:
        _assistant(messages, "content", "tool_calls", "reasoning_content")["reasoning_content"] = text


def _assistant(messages: list[dict[str, Any]], *absent: str) -> dict[str, Any]:
    """Return the assistant's message to extend: the last one, or a new one if the last has any of ``absent``."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) is not None for name in absent):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def input_items(items: str | list[Any], new_id: Callable[[], str]) -> list[dict[str, Any]]:
    """Return the checked ``input`` of a request (without earlier turns) as items, with texts as parts."""
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    return [_with_id(item, new_id) for item in items]


def _with_id(item: dict[str, Any], new_id: Callable[[], str]) -> dict[str, Any]:
    kind = item.get("type", "message")
    named = {"type": kind, **item}
    if not named.get("id"):
        named["id"] = _ID_PREFIXES.get(kind, "item_") + new_id()
    named.setdefault("status", "completed")
    if kind == "message" and isinstance(named["content"], str):
        part = "output_text" if named["role"] == "assistant" else "input_text"
        named["content"] = [{"type": part, "text": named["content"]}]
    return named

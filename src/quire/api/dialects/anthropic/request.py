"""Anthropic's Messages API: its wire models, and how they become a `Conversation`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict

from quire.api.answer_form import ToolUse, tool_use
from quire.api.conversation import Conversation
from quire.api.fields import EFFORTS, SampledFields, Tools
from quire.api.history_parts import add_shown, content_of, newest_index, part_text
from quire.api.template_input import call_message, template_variables
from quire.api.thinking import Thinking
from quire.errors import RequestError, clip
from quire.http.refusals import HttpError, Refusal
from quire.http.wire import (
    INT64_MAX,
    AnyObject,
    AtLeastOne,
    Boolean,
    JsonSchema,
    Past,
    Text,
    Texts,
    TypedObject,
    User,
    Wire,
    as_integer,
    parse,
)
from quire.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:  # loaded with a model that takes images alone
    from quire.api.images import Sight

# The blocks that a message of each role may hold.
ALLOWED = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
Content = Annotated[str | list[Any], Field(description="a string or a list of content blocks")]


class AnthropicFields(Wire):
    """Fields of a message and of a token count."""

    model: Text | None = None
    messages: Annotated[list[Any], Field(description="a list of at least one message", min_length=1)]
    system: Annotated[str | list[Any] | None, Field(description="a string or a list of text blocks")] = None
    tools: Tools | None = None
    tool_choice: TypedObject | None = None
    thinking: TypedObject | None = None
    output_config: AnyObject | None = None
    context_management: AnyObject | None = None
    thread: AnyObject | None = None
    chat_template_kwargs: AnyObject | None = None


class CountTokensRequest(AnthropicFields):
    """Body of ``/v1/messages/count_tokens``."""


class MessagesRequest(AnthropicFields, SampledFields):
    """Body of ``/v1/messages``."""

    max_tokens: AtLeastOne
    stop_sequences: Texts | None = None
    metadata: AnyObject | None = None


class Metadata(Wire):
    """``metadata``. ``user_id`` names the tenant, as `user` does elsewhere."""

    user_id: User = ""


class Turn(Past):
    """One of ``messages``."""

    role: Literal["user", "assistant", "system"]
    content: Content


class TextBlock(Past):
    """A block of text."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(Past):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text


class ToolUseBlock(Past):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: AnyObject


class ToolResultBlock(Past):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Content = ""


BLOCKS = (TextBlock, ThinkingBlock, ToolUseBlock, ToolResultBlock)


class ThinkingSettings(Wire):
    """``thinking``."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[
        int | None,
        Strict(),
        Field(description=f"an integer ≥ 1, at most {INT64_MAX}", ge=1, le=INT64_MAX),
        BeforeValidator(as_integer),
    ] = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Wire):
    """``output_config``."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: AnyObject | None = None


class OutputConfigFormat(Wire):
    """``output_config.format``."""

    type: Literal["json_schema"]
    schema_: Annotated[JsonSchema, Field(alias="schema")]


class ToolChoice(Wire):
    """``tool_choice``."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: Boolean = False


class Tool(Wire):
    """One of ``tools``."""

    type: Annotated[
        Literal["custom"], Field(description="'custom': tools of Anthropic's servers are not supported")
    ] = "custom"
    name: Text
    description: Text | None = None
    input_schema: JsonSchema
    strict: Boolean | None = None


def read_conversation(
    request: AnthropicFields, ignored: list[str] | None, sight: Sight | None = None
) -> Conversation:
    """Return the conversation that a message or a token count asks about.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    messages = _messages(request, ignored, sight)
    variables = dict(request.chat_template_kwargs or {})
    thinking = ThinkingSettings(type="adaptive")  # like no setting: the template decides
    if request.thinking is not None:
        thinking = parse(ThinkingSettings, request.thinking, prefix="thinking.", ignored=ignored)
    if thinking.type != "adaptive":
        for name in ("enable_thinking", "thinking"):
            variables.setdefault(name, thinking.type == "enabled")
    if thinking.budget_tokens is not None and thinking.type != "enabled":
        raise RequestError(
            f"thinking.budget_tokens = {thinking.budget_tokens} is only allowed with the type 'enabled', not with "
            f"{thinking.type!r}.",
            param="thinking.budget_tokens",
        )
    config = parse(OutputConfig, request.output_config or {}, prefix="output_config.", ignored=ignored)
    effort = EFFORTS.get(config.effort or "", config.effort)
    if effort is not None:
        # Only the level: ``thinking`` says whether the model thinks at all.
        variables.setdefault("reasoning_effort", effort)
    return Conversation(
        messages,
        _tool_use(request, ignored),
        template_variables(variables, continues=messages[-1]["role"] == "assistant"),
        # "high" is what happens without an effort.
        Thinking(
            thinking.budget_tokens,
            None if effort == "high" else effort,
            "thinking.budget_tokens",
            "output_config.effort",
        ),
        with_reasoning=thinking.display != "omitted",
    )


def output_form(request: AnthropicFields, ignored: list[str] | None) -> StructuredOutputsParams | None:
    """Return the form of the answer that ``output_config`` asks for; None for free text.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    raw = (request.output_config or {}).get("format")
    if raw is None:
        return None
    prefix = "output_config.format."
    form = parse(OutputConfigFormat, raw, prefix=prefix, ignored=ignored)
    return StructuredOutputsParams(json=form.schema_, param=f"{prefix}schema")


def check_thread(thread: dict[str, Any] | None, ignored: list[str] | None) -> None:
    """Refuse to continue a conversation that the server would have to hold; starting one has no effect.

    Anthropic's client answers this refusal by sending the whole history.

    Raises:
        HttpError: a 404 with the code ``thread_not_found``.
    """
    if not thread:
        return
    if thread.get("type") == "continue":
        message = (
            f"thread.previous_message_id = {clip(thread.get('previous_message_id'))}: no conversations are kept "
            "here. Send the whole history, without thread."
        )
        raise HttpError(Refusal(404, message, "thread", details=(("error_code", "thread_not_found"),)))
    if ignored is not None:
        ignored.append("thread")


def _messages(
    request: AnthropicFields, ignored: list[str] | None, sight: Sight | None
) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # the tool of each call so far, by the call's id
    if request.system is not None:
        text = _text(request.system, "system", ignored)
        if text:
            messages.append({"role": "system", "content": text})
    newest = newest_index(request.messages)
    for i, raw in enumerate(request.messages):
        where = f"messages[{i}]"
        turn = parse(Turn, raw, prefix=where + ".", ignored=ignored)
        if turn.role == "assistant":
            messages.append(_assistant(turn, where, names, ignored))
        elif turn.role == "user":
            messages += _user(turn, where, names, ignored, sight, newest=i == newest)
        else:
            messages.append({"role": "system", "content": _text(turn.content, where + ".content", ignored)})
    if messages[-1].get("tool_calls"):
        raise RequestError(
            f"messages[{len(request.messages) - 1}] ends with tool_use: send the tool_result in a message of the user.",
            param=f"messages[{len(request.messages) - 1}]",
        )
    return messages


def _kind(block: Any, where: str, role: str) -> str:
    """Return the block's type."""
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str):
        return kind
    raise RequestError(
        f"{where} = {clip(block)} is not allowed: a message of the {role} holds blocks of the types "
        f"{', '.join(ALLOWED[role])}.",
        param=where,
        code="invalid_type",
    )


def _text(content: str | list[Any], where: str, ignored: list[str] | None, *, first: int = 0) -> str:
    """Return the text of a string or of blocks, joined by line breaks like the parts of other endpoints.

    ``first``: the place of the first block.
    """
    if isinstance(content, str):
        return content
    texts = []
    for i, block in enumerate(content, first):
        place = f"{where}[{i}]"
        texts.append(_block_text(block, _kind(block, place, "system"), place, ignored))
    return "\n".join(texts)


def _block_text(
    block: dict[str, Any], kind: str, place: str, ignored: list[str] | None, *, newest: bool = False
) -> str:
    if kind == "text":
        return parse(TextBlock, block, prefix=place + ".", ignored=ignored).text
    return part_text(block, place, newest=newest).text


def _assistant(turn: Turn, where: str, names: dict[str, str], ignored: list[str] | None) -> dict[str, Any]:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(turn.content):
        prefix = f"{where}.content[{i}]."
        kind = _kind(block, prefix[:-1], "assistant")
        if kind == "thinking":
            thought = parse(ThinkingBlock, block, prefix=prefix, ignored=ignored)
            thoughts.append(thought.thinking)
        elif kind == "redacted_thinking":  # encrypted: no template can read it
            if ignored is not None:
                ignored.append(prefix + kind)
        elif kind != "tool_use":
            texts.append(_block_text(block, kind, prefix[:-1], ignored))
        else:
            call = parse(ToolUseBlock, block, prefix=prefix, ignored=ignored)
            names[call.id] = call.name
            calls.append(call_message(call.id, call.name, call.input))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message


def _user(
    turn: Turn,
    where: str,
    names: dict[str, str],
    ignored: list[str] | None,
    sight: Sight | None,
    *,
    newest: bool,
) -> list[dict[str, Any]]:
    """Return the messages of a user's turn; each tool result becomes a message of its own, in its place."""
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    messages: list[dict[str, Any]] = []
    for i, block in enumerate(turn.content):
        place = f"{where}.content[{i}]"
        kind = _kind(block, place, "user")
        if kind != "tool_result":
            if sight is not None and kind == "image":
                add_shown(messages, sight.image(block, place, "user"))
            else:
                add_shown(messages, _block_text(block, kind, place, ignored, newest=newest))
            continue
        result = parse(ToolResultBlock, block, prefix=place + ".", ignored=ignored)
        if result.tool_use_id not in names:
            raise RequestError(
                f"{place}.tool_use_id = {clip(result.tool_use_id)} does not match any earlier tool_use block.",
                param=place + ".tool_use_id",
            )
        read = partial(_text, ignored=ignored)
        messages.append(
            {
                "role": "tool",
                "tool_call_id": result.tool_use_id,
                "name": names[result.tool_use_id],
                "content": content_of(result.content, place + ".content", "tool", sight, read),
            }
        )
    return messages or [{"role": "user", "content": ""}]


def _tool(raw: Any, prefix: str, ignored: list[str] | None) -> dict[str, Any]:
    tool = parse(Tool, raw, prefix=prefix, ignored=ignored)
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_use(request: AnthropicFields, ignored: list[str] | None) -> ToolUse:
    tools = [_tool(tool, f"tools[{i}].", ignored) for i, tool in enumerate(request.tools or ())]
    choice = ToolChoice(type="auto")
    if request.tool_choice is not None:
        choice = parse(ToolChoice, request.tool_choice, prefix="tool_choice.", ignored=ignored)
    if (choice.name is not None) != (choice.type == "tool"):
        raise RequestError(
            f"tool_choice = {clip(request.tool_choice)} is not allowed: type 'tool' has a name, the others have none.",
            param="tool_choice",
        )
    if choice.type in ("any", "tool") and not request.tools:
        raise RequestError(
            f"tool_choice of type {choice.type!r} is only allowed with tools.", param="tool_choice"
        )
    named = {"type": "function", "function": {"name": choice.name}}
    wanted = {"any": "required", "tool": named}.get(choice.type, choice.type)
    return tool_use(tools, wanted, not choice.disable_parallel_tool_use, function="")

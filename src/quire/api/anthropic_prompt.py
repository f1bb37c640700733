"""From the messages, tools and settings of Anthropic's Messages API to those of a chat completion."""

from __future__ import annotations

from typing import Any

from quire.api.anthropic_protocol import (
    AnthropicFields,
    OutputConfig,
    OutputConfigFormat,
    TextBlock,
    Thinking,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
)
from quire.api.translated import EFFORTS
from quire.errors import RequestError
from quire.http.wire import clip, parse

# Which blocks a message of each role may hold.
_ALLOWED = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}


def chat_fields(request: AnthropicFields, ignored: list[str] | None) -> dict[str, Any]:
    """Return what the request says of the prompt and of the answer's form, as fields of a `ChatRequest`.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    fields: dict[str, Any] = {"model": request.model, "messages": _messages(request, ignored)}
    if request.tools is not None:
        fields["tools"] = [_tool(tool, f"tools[{i}].", ignored) for i, tool in enumerate(request.tools)]
    if fields["messages"][-1]["role"] == "assistant":
        fields["continue_final_message"] = True
    fields["chat_template_kwargs"] = dict(request.chat_template_kwargs or {})
    _choose(fields, request, ignored)
    _think(fields, request, ignored)
    _shape(fields, request, ignored)
    return {name: value for name, value in fields.items() if value is not None}


def _messages(request: AnthropicFields, ignored: list[str] | None) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # id of each call so far → its tool
    if request.system is not None:
        text = _text(request.system, "system", ignored)
        if text:
            messages.append({"role": "system", "content": text})
    for i, raw in enumerate(request.messages):
        where = f"messages[{i}]"
        turn = parse(Turn, raw, prefix=where + ".", ignored=ignored)
        if turn.role == "assistant":
            messages.append(_assistant(turn, where, names, ignored))
        elif turn.role == "user":
            messages += _user(turn, where, names, ignored)
        else:
            messages.append({"role": "system", "content": _text(turn.content, where + ".content", ignored)})
    if messages[-1].get("tool_calls"):
        raise RequestError(
            f"messages[{len(request.messages) - 1}] ends with tool_use: send the tool_result in a message of the user.",
            param=f"messages[{len(request.messages) - 1}]",
        )
    return messages


def _kind(block: Any, where: str, role: str) -> str:
    """Return the block's type, one that a message of ``role`` may hold."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in _ALLOWED[role]:
        return str(kind)
    raise RequestError(
        f"{where} = {clip(block)} is not allowed: a message of the {role} holds blocks of the types "
        f"{', '.join(_ALLOWED[role])} (the model is text only).",
        param=where,
        code="unsupported_content" if isinstance(kind, str) else "invalid_type",
    )


def _text(content: str | list[Any], where: str, ignored: list[str] | None) -> str:
    """The text of a string or of text blocks, joined by line breaks as the parts of other endpoints are."""
    if isinstance(content, str):
        return content
    texts = []
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        _kind(block, place, "system")
        texts.append(parse(TextBlock, block, prefix=place + ".", ignored=ignored).text)
    return "\n".join(texts)


def _assistant(turn: Turn, where: str, names: dict[str, str], ignored: list[str] | None) -> dict[str, Any]:
    if isinstance(turn.content, str):
        return {"role": "assistant", "content": turn.content}
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(turn.content):
        prefix = f"{where}.content[{i}]."
        kind = _kind(block, prefix[:-1], "assistant")
        if kind == "text":
            texts.append(parse(TextBlock, block, prefix=prefix, ignored=ignored).text)
        elif kind == "thinking":
            thought = parse(ThinkingBlock, block, prefix=prefix, ignored=ignored)
            thoughts.append(thought.thinking)
        else:
            call = parse(ToolUseBlock, block, prefix=prefix, ignored=ignored)
            names[call.id] = call.name
            function = {"name": call.name, "arguments": call.input}
            calls.append({"id": call.id, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    return message


def _user(turn: Turn, where: str, names: dict[str, str], ignored: list[str] | None) -> list[dict[str, Any]]:
    """A message of the user; its tool results are messages of their own, in their places."""
    if isinstance(turn.content, str):
        return [{"role": "user", "content": turn.content}]
    messages: list[dict[str, Any]] = []
    for i, block in enumerate(turn.content):
        place = f"{where}.content[{i}]"
        if _kind(block, place, "user") == "text":
            text = parse(TextBlock, block, prefix=place + ".", ignored=ignored).text
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += "\n" + text
            else:
                messages.append({"role": "user", "content": text})
            continue
        result = parse(ToolResultBlock, block, prefix=place + ".", ignored=ignored)
        if result.tool_use_id not in names:
            raise RequestError(
                f"{place}.tool_use_id = {clip(result.tool_use_id)} is the id of no tool_use block before it.",
                param=place + ".tool_use_id",
            )
        messages.append(
            {
                "role": "tool",
                "tool_call_id": result.tool_use_id,
                "name": names[result.tool_use_id],
                "content": _text(result.content, place + ".content", ignored),
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


def _choose(fields: dict[str, Any], request: AnthropicFields, ignored: list[str] | None) -> None:
    """``tool_choice``."""
    if request.tool_choice is None:
        return
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
    fields["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
    fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use


def _think(fields: dict[str, Any], request: AnthropicFields, ignored: list[str] | None) -> None:
    """``thinking``: adaptive, like nothing, leaves it to the template."""
    if request.thinking is None:
        return
    thinking = parse(Thinking, request.thinking, prefix="thinking.", ignored=ignored)
    if thinking.type != "adaptive":
        for name in ("enable_thinking", "thinking"):
            fields["chat_template_kwargs"].setdefault(name, thinking.type == "enabled")
    fields["include_reasoning"] = thinking.display != "omitted"
    if thinking.budget_tokens is not None:
        if thinking.type != "enabled":
            raise RequestError(
                f"thinking.budget_tokens = {thinking.budget_tokens} is only allowed with the type 'enabled', not with "
                f"{thinking.type!r}.",
                param="thinking.budget_tokens",
            )
        fields["thinking_token_budget"] = thinking.budget_tokens


def effort_of(request: AnthropicFields) -> str | None:
    """Return OpenAI's name of ``output_config.effort``; None for "high", which is what happens without it."""
    effort = (request.output_config or {}).get("effort")
    return None if effort in (None, "high") else EFFORTS.get(effort, effort)


def _shape(fields: dict[str, Any], request: AnthropicFields, ignored: list[str] | None) -> None:
    """``output_config``."""
    if request.output_config is None:
        return
    prefix = "output_config."
    config = parse(OutputConfig, request.output_config, prefix=prefix, ignored=ignored)
    if config.effort is not None:
        # Only the level: whether the model thinks at all is what `thinking` says.
        effort = EFFORTS.get(config.effort, config.effort)
        fields["chat_template_kwargs"].setdefault("reasoning_effort", effort)
    if config.format is not None:
        form = parse(OutputConfigFormat, config.format, prefix=prefix + "format.", ignored=ignored)
        schema = {"name": "output", "schema": form.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}

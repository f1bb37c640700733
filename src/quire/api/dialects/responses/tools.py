"""``tools`` of the Responses API: functions, custom tools (text in, text out) and namespaces of both.

A chat template knows functions alone, so the model sees a custom tool as a function with one text, ``input``, and a
tool of a namespace under both names. `ResponseTools` turns the calls back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from quire.api.answer_form import TextGrammar, ToolUse, tool_use
from quire.api.assembler import Part
from quire.api.template_input import parsed_arguments
from quire.errors import RequestError
from quire.http.wire import AnyObject, Boolean, Text, Wire, not_allowed, parse

_KINDS = "'function', 'custom' or 'namespace'"
_INPUT = "input"  # the parameter that has the text of a custom tool
# Tools that OpenAI's servers run; what to do without them.
_HOSTED = {
    "web_search": 'There is no web search: send a function that searches (in Codex: web_search = "disabled")',
    "web_search_preview": "There is no web search: send a function that searches",
    "file_search": "There are no stored files to search: send a function that searches",
    "code_interpreter": "There is no code execution: send a function that runs code",
    "image_generation": "The model reads and writes text only",
    "computer_use_preview": "The model reads and writes text only",
    "local_shell": "Send the shell as a function or a custom tool",
    "mcp": "The server calls no other servers: list the tools of the MCP server as functions",
    "tool_search": "All tools are shown to the model: send them as functions",
}


class FunctionTool(Wire):
    """One of ``tools``."""

    type: Literal["function"]
    name: Text
    description: Text | None = None
    parameters: AnyObject | None = None
    strict: Boolean | None = None


class CustomTool(Wire):
    """One of ``tools``, whose input is text."""

    type: Literal["custom"]
    name: Text
    description: Text = ""
    format: AnyObject | None = None


class CustomFormat(Wire):
    """``format`` of a custom tool."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Text | None = None


class Namespace(Wire):
    """One of ``tools``, which has tools of its own."""

    type: Literal["namespace"]
    name: Text
    description: Text = ""
    tools: Annotated[list[Any], Field(description="a list of tools")]


class NamedChoice(Wire):
    """``tool_choice`` as an object."""

    type: Literal["function", "custom"]
    name: Text


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """Which of the names that the model calls are custom tools, and which are in a namespace."""

    custom: frozenset[str]
    namespaces: Mapping[str, tuple[str, str]]  # the name that the model sees → namespace, name in it

    @classmethod
    def of(cls, tools: Sequence[Any]) -> ResponseTools:
        """Read checked ``tools``."""
        flat: list[tuple[str | None, Any]] = [(None, tool) for tool in tools if tool["type"] != "namespace"]
        flat += [
            (space["name"], tool)
            for space in tools
            if space["type"] == "namespace"
            for tool in space["tools"]
        ]
        named = [(visible(tool.get("name", ""), space), space, tool) for space, tool in flat]
        return cls(
            frozenset(name for name, _, tool in named if tool["type"] == "custom"),
            {name: (space, tool["name"]) for name, space, tool in named if space is not None},
        )

    def item(self, part: Part, item_id: str, status: str) -> dict[str, Any]:
        """Return the output item of a call."""
        namespace, name = self.namespaces.get(part.name, (None, part.name))
        beside = {"id": item_id, "status": status, "call_id": part.id, "name": name}
        if namespace is not None:
            beside["namespace"] = namespace
        begun = status == "in_progress"
        if part.name in self.custom:
            return {
                "type": "custom_tool_call",
                **beside,
                "input": "" if begun else custom_tool_input(part.text),
            }
        return {"type": "function_call", **beside, "arguments": "" if begun else part.text}


def visible(name: str, namespace: str | None) -> str:
    """Return the name under which the model sees a tool."""
    return name if namespace is None else f"{namespace}.{name}"


def as_arguments(text: str) -> dict[str, Any]:
    """Return the arguments that a template shows of a custom tool's call."""
    return {_INPUT: text}


def custom_tool_input(arguments: str) -> str:
    """Return the text that the model gives to a custom tool; arguments in another form stand in it as they are."""
    value = parsed_arguments(arguments).get(_INPUT)
    return value if isinstance(value, str) else arguments


def response_tool_use(
    tools: Sequence[Any], choice: Any, parallel: bool, ignored: list[str] | None
) -> ToolUse:
    """Return the tools as a template reads them, and which may or must be called.

    Raises:
        RequestError: names the tool and what is allowed.
    """
    parsed: list[dict[str, Any]] = []
    grammars: dict[str, TextGrammar] = {}
    for i, tool in enumerate(tools):
        parsed += _read(tool, f"tools[{i}]", None, ignored, grammars)
    if isinstance(choice, dict) and choice.get("type") != "allowed_tools":
        named = parse(NamedChoice, choice, prefix="tool_choice.", ignored=ignored)
        choice = {"type": "function", "function": {"name": named.name}}
    use = tool_use(parsed, choice, parallel, function="")
    return replace(use, grammars={name: grammars[name] for name in grammars if name in use.schemas})


def _read(
    raw: Any,
    where: str,
    namespace: str | None,
    ignored: list[str] | None,
    grammars: dict[str, TextGrammar],
) -> list[dict[str, Any]]:
    """Return the functions of one tool, and add the grammars of custom tools to ``grammars``."""
    kind = raw.get("type") if isinstance(raw, dict) else None
    prefix = where + "."
    if kind == "namespace" and namespace is None:
        space = parse(Namespace, raw, prefix=prefix, ignored=ignored)
        inner = [
            _read(tool, f"{prefix}tools[{i}]", space.name, ignored, grammars)
            for i, tool in enumerate(space.tools)
        ]
        return [tool for tools in inner for tool in tools]
    if kind == "custom":
        custom = parse(CustomTool, raw, prefix=prefix, ignored=ignored)
        shown, grammar = _of_format(custom, prefix, ignored)
        function: dict[str, Any] = {"name": custom.name, **shown}
        if grammar is not None:
            grammars[visible(custom.name, namespace)] = grammar
    elif kind == "function":
        tool = parse(FunctionTool, raw, prefix=prefix, ignored=ignored)
        function = tool.model_dump(exclude_none=True, exclude={"type"})
    elif kind == "web_search" and raw.get("external_web_access") is False:
        # What Codex asks for by default: pages from OpenAI's cache, if there are any.
        if ignored is not None:
            ignored.append(f"{where}.{kind}")
        return []
    elif isinstance(kind, str) and kind in _HOSTED:
        raise RequestError(
            f"{where} is the built-in tool {kind!r}, which runs on OpenAI's servers. {_HOSTED[kind]}.",
            param=where + ".type",
            code="unsupported_parameter",
        )
    else:
        raise not_allowed(where + ".type", kind, _KINDS)
    return [{"type": "function", "function": {**function, "name": visible(function["name"], namespace)}}]


def _of_format(
    tool: CustomTool, prefix: str, ignored: list[str] | None
) -> tuple[dict[str, Any], TextGrammar | None]:
    """Return description and parameters of a custom tool, and its grammar, which the description shows."""
    form = parse(CustomFormat, tool.format or {"type": "text"}, prefix=prefix + "format.", ignored=ignored)
    text: dict[str, Any] = {"type": "string", "description": "The text that the tool reads."}
    description, grammar = tool.description, None
    if form.type == "grammar":
        if form.syntax is None or form.definition is None:
            missing = "syntax" if form.syntax is None else "definition"
            raise RequestError(
                f"{prefix}format.{missing} is required with the type 'grammar'.",
                param=f"{prefix}format.{missing}",
                code="missing_required_parameter",
            )
        description += f"\n\nIts {_INPUT} matches this {form.syntax} grammar:\n{form.definition}"
        lark = form.definition if form.syntax == "lark" else None
        grammar = TextGrammar(_INPUT, lark, f"{prefix}format.definition")
        if lark is None:
            text["pattern"] = f"^(?:{form.definition})$"
    parameters = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT]}
    shown = {"description": description.strip(), "parameters": {**parameters, "additionalProperties": False}}
    return shown, grammar

"""The form of an answer: ``response_format``, ``structured_outputs``, their other names; tool calls (`ToolUse`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from quire.api.fields import GenerationFields
from quire.errors import RequestError, clip
from quire.http.field_rules import rules_of
from quire.http.wire import AnyObject, Boolean, JsonSchema, Text, Wire, not_allowed, parse, sift
from quire.structured_outputs import StructuredOutputsParams
from quire.text.output.call_grammar import LARK

# Names that mean the same as a field of structured_outputs: vLLM's older ones, then SGLang's.
ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
# The type of response_format that each of its parts belongs to.
_PART_TYPES = {
    "json_schema": ("json_schema",),
    "schema": ("json_object", "json_schema"),
    "value": ("json_object", "json", "regex"),
    "structures": ("structural_tag",),
    "triggers": ("structural_tag",),
    "format": ("structural_tag",),
}


class JsonSchemaFormat(Wire):
    """``response_format.json_schema``. The schema holds with and without ``strict``."""

    name: Text | None = None
    schema_: Annotated[JsonSchema, Field(alias="schema")]
    strict: Boolean | None = None


class ResponseFormat(Wire):
    """``response_format`` of OpenAI, and vLLM's type structural_tag.

    Some clients put the schema beside the type: those of llama.cpp and Together as ``schema``, huggingface_hub as
    ``value``.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag", "json", "regex"]
    json_schema: AnyObject | None = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    value: Annotated[
        str | dict[str, Any] | None, Field(description="a JSON schema (an object), or a regex")
    ] = None
    structures: Annotated[list[Any] | None, Field(description="a list of objects")] = None
    triggers: Annotated[list[Any] | None, Field(description="a list of strings")] = None
    format: AnyObject | None = None


class StructuredOutputs(Wire):
    """``structured_outputs``; `StructuredOutputsParams` checks the values."""

    json_: Annotated[Any, Field(alias="json")] = None
    regex: Any = None
    choice: Any = None
    grammar: Any = None
    json_object: Any = None
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_any_whitespace: Boolean = False
    disable_additional_properties: Boolean | None = None


def structured_outputs(
    request: GenerationFields, ignored: list[str] | None = None
) -> StructuredOutputsParams | None:
    """Return the form of the answer that the request asks for; None for free text.

    Raises:
        RequestError: a wrong value, or two fields that both set the form; ``param`` is the client's name.
    """
    names = [name for name in ("response_format", "structured_outputs", *ALIASES) if _is_set(request, name)]
    if len(names) > 1:
        raise RequestError(
            f"{names[0]} and {names[1]} both say what form the answer has: send one of them.", param=names[1]
        )
    pattern = request.guided_whitespace_pattern
    if pattern is not None and names not in (["guided_json"], ["json_schema"]):
        raise RequestError(
            "guided_whitespace_pattern is only allowed with guided_json.", param="guided_whitespace_pattern"
        )
    if not names:
        return None
    name = names[0]
    if name == "response_format":
        return _response_format(request, ignored)
    if name == "structured_outputs":
        outputs = parse(StructuredOutputs, request.structured_outputs, prefix=f"{name}.", ignored=ignored)
        return StructuredOutputsParams(**outputs.model_dump(by_alias=True), param=name)
    values = {ALIASES[name]: getattr(request, name)}
    return StructuredOutputsParams(**values, whitespace_pattern=pattern, param=name)


def schema_form(raw: Any, prefix: str, ignored: list[str] | None) -> StructuredOutputsParams:
    """Return the form of an object with a name and a JSON schema; ``prefix`` is its path, with a dot.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    schema = parse(JsonSchemaFormat, raw, prefix=prefix, ignored=ignored)
    return StructuredOutputsParams(json=schema.schema_, param=f"{prefix}schema")


def _is_set(request: GenerationFields, name: str) -> bool:
    value = getattr(request, name)
    return value is not None and not (name == "response_format" and value == {"type": "text"})


def _response_format(request: GenerationFields, ignored: list[str] | None) -> StructuredOutputsParams | None:
    name = "response_format"
    form = parse(ResponseFormat, request.response_format, prefix=f"{name}.", ignored=ignored)
    parts = form.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    for part in parts:
        if form.type not in _PART_TYPES[part]:
            raise RequestError(
                f"{name}.{part} is only allowed with type {_PART_TYPES[part][0]!r}, not with {form.type!r}.",
                param=f"{name}.{part}",
            )
    if len(parts) > 1 and form.type != "structural_tag":
        first, second = list(parts)[:2]
        raise RequestError(
            f"{name}.{first} and {name}.{second} both say what form the answer has: send one of them.",
            param=f"{name}.{second}",
        )
    if form.type == "text":
        return None
    if form.type == "structural_tag":
        return StructuredOutputsParams(structural_tag=form.model_dump(exclude_none=True), param=name)
    if form.json_schema is not None:
        return schema_form(form.json_schema, f"{name}.json_schema.", ignored)
    if parts:
        (part,) = parts
        return _beside(form.type, parts[part], f"{name}.{part}")
    if form.type == "json_object":
        return StructuredOutputsParams(json_object=True, param=name)
    part, what = (
        ("json_schema", "an object with a schema") if form.type == "json_schema" else ("value", "the form")
    )
    raise RequestError(
        f"{name}.{part} is required with type {form.type!r}: {what}.",
        param=f"{name}.{part}",
        code="missing_required_parameter",
    )


def _beside(kind: str, value: Any, where: str) -> StructuredOutputsParams:
    """Return the form of a value beside the type: a regular expression, or a JSON schema."""
    if isinstance(value, str) != (kind == "regex"):
        allowed = "a regular expression (a string)" if kind == "regex" else "a JSON schema (an object)"
        raise not_allowed(where, value, allowed, "invalid_type")
    return StructuredOutputsParams(**{"regex" if kind == "regex" else "json": value}, param=where)


TOOL = rules_of(["tools"], ["type", "function"])
FUNCTION = rules_of([], ["name", "description", "parameters", "strict", "return", "response"])
NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,128}")


class TextGrammar(NamedTuple):
    """The grammar that a custom tool's input keeps to."""

    parameter: str  # the argument with the input
    lark: str | None  # None: a regular expression, in the parameter's schema
    param: str  # its path in the request


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``tools`` as the template gets them. ``choice`` is none, auto, required, or "=" and a tool's name."""

    tools: tuple[dict[str, Any], ...] = ()
    choice: str = "auto"
    parallel: bool = True
    grammars: Mapping[str, TextGrammar] = field(
        default_factory=dict
    )  # name of a tool whose input is a text → its grammar

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The parameters of each tool that may be called, by name."""
        chosen = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}
        return {} if self.choice == "none" else chosen

    @property
    def enforced(self) -> dict[str, Mapping[str, Any]]:
        """`schemas` as a call is held to them: with the grammars, which the template does not show."""
        schemas = self.schemas
        for name, grammar in self.grammars.items():
            if name in schemas and grammar.lark is not None:
                text = {"type": "string", LARK: grammar.lark}
                schemas[name] = {**schemas[name], "properties": {grammar.parameter: text}}
        return schemas

    @property
    def required(self) -> tuple[str, ...]:
        """Names of tools of which one must be called; empty if the model decides."""
        if self.choice == "required":
            return tuple(self.schemas)
        return (self.choice[1:],) if self.choice.startswith("=") else ()


NO_TOOLS = ToolUse()


def tool_use(
    tools: Sequence[dict[str, Any]], choice: Any, parallel: bool | None, *, function: str
) -> ToolUse:
    """Check names and ``tool_choice``. ``tools`` are in OpenAI's form; ``function`` is the path of one in its tool.

    Raises:
        RequestError: a name that is not allowed or not unique, or a choice without a tool of that name.
    """
    names: list[str] = []
    for i, tool in enumerate(tools):
        where, name = f"tools[{i}]{function}.name", tool["function"].get("name")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise not_allowed(where, name, "1 to 128 letters, digits, '_', '-' or '.'")
        if name in names:
            raise RequestError(f"{where} = {clip(name)} is used twice.", param=f"tools[{i}]")
        names.append(name)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice, allowed = _allowed_tools(choice, names)
        tools = [tool for tool in tools if tool["function"]["name"] in allowed]
        names = [name for name in names if name in allowed]
    chosen = _choice(choice, names)
    # A named tool is called exactly once, as at OpenAI; small models would call it until their tokens end.
    return ToolUse(tuple(tools), chosen, parallel is not False and not chosen.startswith("="))


def chat_tools(tools: list[Any] | None, ignored: list[str] | None) -> list[dict[str, Any]]:
    """Return the checked ``tools`` of a chat completion; `tool_use` checks their names.

    Raises:
        RequestError: names the tool and what it must be.
    """
    return [_tool(tool, f"tools[{i}]", ignored) for i, tool in enumerate(tools or ())]


def _tool(tool: Any, where: str, ignored: list[str] | None) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") not in (None, "function"):
        raise not_allowed(where, tool, '{"type": "function", "function": {…}}', "invalid_type")
    sift(tool, TOOL, prefix=where + ".", ignored=ignored)
    prefix = where + ".function."
    sift(function, FUNCTION, prefix=prefix, ignored=ignored)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise not_allowed(prefix + "parameters", parameters, "a JSON schema (an object)", "invalid_type")
    return {**tool, "type": "function"}


def _allowed_tools(choice: dict[str, Any], names: list[str]) -> tuple[Any, dict[str, None]]:
    """Return the mode and the names of ``allowed_tools``: of chats in an object of that name, of responses beside it.

    The model is not shown the other tools.
    """
    where, form = "tool_choice", choice
    if "allowed_tools" in choice:
        where, form = "tool_choice.allowed_tools", choice["allowed_tools"]
    listed = form.get("tools") if isinstance(form, dict) else None
    mode = form.get("mode", "auto") if isinstance(form, dict) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        raise not_allowed(where, form, "an object with mode ('auto' or 'required') and tools (at least one)")
    allowed_names: dict[str, None] = {}
    for i, tool in enumerate(listed):
        named = tool.get("function", tool) if isinstance(tool, dict) else None
        name = named.get("name") if isinstance(named, dict) else None
        space = tool.get("namespace") if isinstance(tool, dict) else None
        name = f"{space}.{name}" if isinstance(space, str) else name
        if name not in names:
            known = ", ".join(names) or "none"
            raise not_allowed(f"{where}.tools[{i}]", tool, f"one of the request's tools: {known}")
        allowed_names[str(name)] = None
    return mode, allowed_names


def _choice(choice: Any, names: list[str]) -> str:
    if choice is None:
        return "auto"
    if choice in ("none", "auto"):
        return str(choice)
    if choice == "required":
        if names:
            return "required"
        raise RequestError("tool_choice = 'required' is only allowed with tools.", param="tool_choice")
    function = (
        choice.get("function")
        if isinstance(choice, dict) and choice.get("type") in (None, "function")
        else None
    )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        form = '{"type": "function", "function": {"name": …}}'
        raise not_allowed("tool_choice", choice, f"'none', 'auto', 'required' or {form}")
    if name not in names:
        known = ", ".join(names) or "none"
        message = f"tool_choice names {clip(name)}, which is not a tool of this request; tools: {known}."
        raise RequestError(message, param="tool_choice")
    return "=" + name

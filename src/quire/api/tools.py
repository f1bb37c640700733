"""Tools of a chat request, and how the model's answer is taken apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.api.state import ApiState
from quire.errors import RequestError
from quire.http.wire import clip, rules_of, sift
from quire.structured_outputs import StructuredOutputsParams
from quire.text.output import OutputFormat, OutputParser, prompt_opening
from quire.text.output.call_grammar import after_reasoning, form_of, required_calls
from quire.text.output.formats import without_tools

TOOL = rules_of(["tools"], ["type", "function"])
FUNCTION = rules_of([], ["name", "description", "parameters", "strict", "return", "response"])
_NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``tools`` as the template gets them. ``choice`` is none, auto, required, or a tool's name behind "="."""

    tools: tuple[dict[str, Any], ...] = ()
    choice: str = "auto"
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Name of each tool that may be called → its parameters."""
        chosen = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}
        return {} if self.choice == "none" else chosen

    @property
    def required(self) -> tuple[str, ...]:
        """Names of which one must be called; empty where the model decides."""
        if self.choice == "required":
            return tuple(self.schemas)
        return (self.choice[1:],) if self.choice.startswith("=") else ()


def tool_use(
    tools: list[Any] | None, choice: Any, parallel: bool | None, ignored: list[str] | None
) -> ToolUse:
    """Check ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    Raises:
        RequestError: a tool that is none, a name that comes twice, a choice without a tool of that name.
    """
    checked = tuple(_tool(tool, f"tools[{i}]", ignored) for i, tool in enumerate(tools or ()))
    names = [tool["function"]["name"] for tool in checked]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise RequestError(f"tools[{i}].function.name = {clip(name)} comes twice.", param=f"tools[{i}]")
    named = _choice(choice, names)
    return ToolUse(checked, named, parallel is not False)


def _tool(tool: Any, where: str, ignored: list[str] | None) -> dict[str, Any]:
    if (
        not isinstance(tool, dict)
        or tool.get("type") != "function"
        or not isinstance(tool.get("function"), dict)
    ):
        raise RequestError(
            f'{where} = {clip(tool)} is not allowed: it must be {{"type": "function", "function": {{…}}}}.',
            param=where,
            code="invalid_type",
        )
    sift(tool, TOOL, prefix=where + ".", ignored=ignored)
    function = tool["function"]
    prefix = where + ".function."
    sift(function, FUNCTION, prefix=prefix, ignored=ignored)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{prefix}name = {clip(name)} is not allowed: it must be 1 to 128 letters, digits, '_', '-' or '.'.",
            param=prefix + "name",
        )
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(
            f"{prefix}parameters = {clip(parameters)} is not allowed: it must be a JSON schema (an object).",
            param=prefix + "parameters",
            code="invalid_type",
        )
    return tool


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
        choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    )
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice = {clip(choice)} is not allowed: it must be 'none', 'auto', 'required' or "
            '{"type": "function", "function": {"name": …}}.',
            param="tool_choice",
        )
    if name not in names:
        raise RequestError(
            f"tool_choice names {clip(name)}, which is no tool of this request; tools: {', '.join(names) or 'none'}.",
            param="tool_choice",
        )
    return "=" + name


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """How the answers of one request are taken apart; `parser` makes a parser for each of them."""

    format: OutputFormat
    schemas: Mapping[str, Mapping[str, Any]]
    opening: str
    hidden: tuple[str, ...]
    with_reasoning: bool = True  # false: it is left out of the answer
    max_calls: int | None = None  # what parallel_tool_calls = false allows

    def constrained(
        self, use: ToolUse, form: StructuredOutputsParams | None
    ) -> StructuredOutputsParams | None:
        """Return the form of the whole answer: the calls that ``use`` requires, or ``form``, behind the reasoning.

        Raises:
            RequestError: both say what the answer is, or the format's calls cannot be required.
        """
        part: dict[str, Any] | None = None
        param = "tool_choice" if form is None else form.param
        in_reasoning = self.format.reasoning is not None and self.opening == self.format.reasoning[0]
        if use.required:
            if form is not None:
                raise RequestError(
                    f"tool_choice requires a call, and {form.param} says another form: send one of them.",
                    param="tool_choice",
                )
            part = required_calls(self.format, self.schemas, use.required, parallel=use.parallel)
            if part is None:
                raise RequestError(
                    f"tool_choice = {clip(use.choice)} is not supported with the tool format {self.format.name!r} of "
                    "this model; 'auto' and 'none' are.",
                    param="tool_choice",
                )
        elif form is None or not in_reasoning:
            return form
        else:
            part = form_of(form.kind, getattr(form, form.kind))
            if part is None:
                return form
        if in_reasoning:
            part = after_reasoning(self.format, part)
        return StructuredOutputsParams(structural_tag={"format": part}, param=param)

    def parser(self) -> OutputParser:
        return OutputParser(self.format, self.schemas, opening=self.opening, hidden=self.hidden)


def output_plan(
    state: ApiState,
    use: ToolUse,
    prompt: str,
    *,
    separate_reasoning: bool,
    with_reasoning: bool,
    skip_special_tokens: bool,
) -> OutputPlan | None:
    """Return how the answer is taken apart; None where it is plain text."""
    format = state.output_format(bool(use.tools))
    if not use.schemas:
        format = without_tools(format)
    elif format.calls is None and not format.harmony:
        raise RequestError(
            "tools are not supported by this model: its chat template shows no format of calls. Start the server with "
            "--chat-template or --tool-format, or send tool_choice = 'none'.",
            param="tools",
        )
    if not separate_reasoning:
        format = replace(format, reasoning=None)
    if format.plain:
        return None
    return OutputPlan(
        format,
        use.schemas,
        prompt_opening(format, prompt),
        state.special_texts if skip_special_tokens else (),
        with_reasoning,
        None if use.parallel else 1,
    )

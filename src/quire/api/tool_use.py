"""`ToolUse`: the tools of a request and which of them it may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError, clip
from quire.http.wire import not_allowed, rules_of, sift

TOOL = rules_of(["tools"], ["type", "function"])
FUNCTION = rules_of([], ["name", "description", "parameters", "strict", "return", "response"])
_NAME = re.compile(r"[a-zA-Z0-9_.\-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``tools`` as the template gets them. ``choice`` is none, auto, required, or "=" and a tool's name."""

    tools: tuple[dict[str, Any], ...] = ()
    choice: str = "auto"
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The parameters of each tool that may be called, by name."""
        chosen = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}
        return {} if self.choice == "none" else chosen

    @property
    def required(self) -> tuple[str, ...]:
        """Names of tools of which one must be called; empty if the model decides."""
        if self.choice == "required":
            return tuple(self.schemas)
        return (self.choice[1:],) if self.choice.startswith("=") else ()


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
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise not_allowed(where, name, "1 to 128 letters, digits, '_', '-' or '.'")
        if name in names:
            raise RequestError(f"{where} = {clip(name)} is used twice.", param=f"tools[{i}]")
        names.append(name)
    return ToolUse(tuple(tools), _choice(choice, names), parallel is not False)


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

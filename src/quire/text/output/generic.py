"""Tool calls with a model whose chat template has none, or none of a known format: they are asked for in a message.

The tools, earlier calls and their results become text of the conversation. The model is asked to write its calls as
JSON in ``<tool_call>`` tags, which the format `generic` reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.text.output.detect import detect_format, shows_tools
from quire.text.output.formats import FORMATS, OutputFormat

_ASK = """You can call these functions. Each line is one of them, as JSON:
{tools}

To call one, answer with this block and nothing after it, one block per call:
<tool_call>
{{"name": "NAME", "arguments": {{"PARAMETER": VALUE}}}}
</tool_call>
The results are in the next message. If no call is needed, answer in plain text."""


def format_of(template: str) -> OutputFormat:
    """Return the format of a template's calls, or `generic` with the template's reasoning if it has none."""
    format = detect_format(template)
    return format if format.calls_tools else replace(FORMATS["generic"], reasoning=format.reasoning)


def describe(template: str) -> str:
    """Return what the start-up log says of the tool calls of this template."""
    format = format_of(template)
    if not format.asks_in_message:
        return f"{format.name} (from the chat template)"
    why = "shows calls in marks of no known format" if shows_tools(template) else "shows no tools"
    return f"generic: the chat template {why}, so calls are asked for in a message; --tool-format overrides"


def with_tools_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], template: str
) -> list[dict[str, Any]]:
    """Return the conversation with ``tools`` described, and with earlier calls and results as text."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        turn = _as_text(message)
        joins = turns and turn["role"] == turns[-1]["role"] == "user" and message["role"] == "tool"
        if joins:
            turns[-1]["content"] = _joined(turns[-1].get("content"), turn["content"])
        else:
            turns.append(turn)
    if tools:
        lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
        _add(turns, _ASK.format(tools=lines), template)
    return turns


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    turn = dict(message)
    if turn["role"] in ("tool", "function"):
        content, begin, end = turn.get("content") or "", "<tool_response>\n", "\n</tool_response>"
        if isinstance(content, list):
            return {"role": "user", "content": [_part(begin), *content, _part(end)]}
        return {"role": "user", "content": f"{begin}{content}{end}"}
    calls = turn.pop("tool_calls", None)
    if calls:
        blocks = [json.dumps(call.get("function", call), ensure_ascii=False) for call in calls]
        texts = [f"<tool_call>\n{block}\n</tool_call>" for block in blocks]
        turn["content"] = "\n".join([turn["content"], *texts] if turn.get("content") else texts)
    return turn


def _joined(first: Any, second: Any) -> Any:
    """Return two contents, strings or lists of parts, one after the other."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    first, second = (
        [_part(content)] if isinstance(content, str) else content or [] for content in (first, second)
    )
    return [*first, _part("\n"), *second]


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _add(turns: list[dict[str, Any]], text: str, template: str) -> None:
    """Add ``text`` to the system message, or to the first of the user if the template takes no system message."""
    first = turns[0] if turns else None
    if first is not None and first["role"] in ("system", "developer") and isinstance(first["content"], str):
        turns[0] = {**first, "content": f"{first['content']}\n\n{text}"}
    elif "system" in template and re.search(r"[Ss]ystem role", template) is None:
        turns.insert(0, {"role": "system", "content": text})
    else:
        at = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), None)
        if at is None or not isinstance(turns[at].get("content"), str):
            turns.insert(0, {"role": "user", "content": text})
        else:
            turns[at] = {**turns[at], "content": f"{text}\n\n{turns[at]['content']}"}

"""Which format a model writes: its chat template shows the model how its earlier calls looked.

A template is recognized by every mark of a format, in the text that it writes: its plain text and the strings of its
expressions, in their order. A template that shows some of the marks only belongs to another family, perhaps a newer
one, and reading it as the older one would leave calls in the content.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from jinja2 import Environment
from jinja2.exceptions import TemplateError

from quire.text.output.formats import (
    FORMATS,
    GemmaCalls,
    JsonCalls,
    NamedCalls,
    NestedCalls,
    OutputFormat,
    TaggedCalls,
)

THINK = ("<think>", "</think>")
_REASONING = (
    THINK,
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<think:opensource>", "</think:opensource>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<mm:think>", "</mm:think>"),
    ("<ifm|think>", "</ifm|think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<thought>", "</thought>"),
    ("◁think▷", "◁/think▷"),
    ("Here is my thought process:", "Here is my response:"),
)
# In `written`: the value of an expression, and one that is written as JSON.
_VALUE, _JSON = "\0", "\1"
_LEXER = Environment(trim_blocks=True, lstrip_blocks=True).lexer


@lru_cache(maxsize=64)
def detect_format(template: str | None) -> OutputFormat:
    """Return the format that fits the template; `reasoning` or `plain` if it shows the calls of none."""
    if not template:
        return FORMATS["plain"]
    text = written(template)
    for format in FORMATS.values():
        if _fits(format, template, text):
            return _with_reasoning(format, template)
    marks = next((marks for marks in _REASONING if marks[1] in template), None)
    return FORMATS["plain"] if marks is None else replace(FORMATS["reasoning"], reasoning=marks)


def shows_tools(template: str) -> bool:
    """Return whether the template reads tools or calls at all."""
    return re.search(r"\btool(s|_calls)\b", template) is not None


def written(template: str) -> str:
    """Return what the template writes, branch after branch, with `_VALUE` for values that it computes.

    Variables that are set to a string, once, count as that string.
    """
    try:
        tokens = [(t.type, str(t.value)) for t in _LEXER.tokenize(template)]
    except TemplateError:
        return template
    constants: dict[str, str | None] = {}
    for i in range(len(tokens) - 4):
        kinds = [kind for kind, _ in tokens[i : i + 5]]
        if kinds == ["name", "name", "assign", "string", "block_end"] and tokens[i][1] == "set":
            name = tokens[i + 1][1]
            constants[name] = None if name in constants else tokens[i + 3][1]
    parts: list[str] = []
    block = ""  # name of the statement around the token; "{": expression
    for i, (kind, text) in enumerate(tokens):
        before, after = tokens[i - 1][0] if i else "", tokens[i + 1][0] if i + 1 < len(tokens) else ""
        if kind == "data":
            parts.append(text)
        elif kind in ("variable_begin", "block_begin"):
            block = "{" if kind == "variable_begin" else tokens[i + 1][1]
        elif block not in ("{", "set"):
            continue
        elif kind == "string" and not (before == "lbracket" and after == "rbracket"):
            parts.append(text)
        elif kind == "name" and block == "{":
            value = None if before == "dot" else constants.get(text)
            parts.append(value or (_JSON if text == "tojson" else _VALUE))
    return re.sub(r"\0+", "\0", "".join(parts))


def marks(format: OutputFormat) -> tuple[str, ...]:
    """Return the marks that a template of this format writes around calls, their keys and their values."""
    calls = format.calls
    texts = [*format.opens[:1], *format.closes[:1]]
    if isinstance(calls, NamedCalls):
        texts += [calls.open, calls.args, calls.close]
    elif isinstance(calls, TaggedCalls):
        texts += [
            calls.open,
            calls.name_end,
            calls.key,
            calls.key_end,
            calls.value,
            calls.value_end,
            calls.close,
        ]
    elif isinstance(calls, NestedCalls):
        texts += [calls.open, calls.prefix, calls.close]
    elif isinstance(calls, GemmaCalls):
        texts += [calls.quote]
    return tuple(mark.strip() for mark in texts if len(mark.strip()) > 2)


def _fits(format: OutputFormat, template: str, text: str) -> bool:
    if format.signs:
        return any(all(sign in text or sign in template for sign in signs) for signs in format.signs)
    needed = marks(format)
    if not needed or not all(mark in text for mark in needed):
        return False
    return not isinstance(format.calls, JsonCalls) or _opens_json(format, text)


def _opens_json(format: OutputFormat, text: str) -> bool:
    """Return whether somewhere an opening is followed by JSON, and not by marks of another family."""
    opens = "|".join(re.escape(mark.strip()) for mark in format.opens)
    return re.search(rf"({opens})\s*[\[{{\1]", text) is not None


def _with_reasoning(format: OutputFormat, template: str) -> OutputFormat:
    """Return the format with the reasoning marks of its template; without any, <think> in an answer is text."""
    if format.messages is not None or format.keeps_reasoning:
        return format
    marks = next((marks for marks in _REASONING if marks[1] in template), None)
    return replace(format, reasoning=marks)

"""The grammar of an answer that must be tool calls, from the description with which the parser reads calls.

The result is a structural tag (`quire.text.grammar`): the format's marks, and arguments by the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.output.formats import JsonCalls, NamedCalls, OutputFormat, TaggedCalls, Tools
from quire.text.output.typed import is_text

Form = dict[str, Any]


def required_calls(
    format: OutputFormat, tools: Tools, names: Sequence[str], *, parallel: bool
) -> Form | None:
    """Return the form of an answer that calls one of ``names``, with ``parallel`` perhaps several times.

    None: calls cannot be required in this format.
    """
    calls = format.calls
    if format.harmony:
        open_mark = "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return _either([_tag(open_mark.format(name=name), _schema(tools[name]), "") for name in names])
    if isinstance(calls, NamedCalls):
        many = parallel and "{index}" not in calls.written
        each = [
            _tag(
                calls.open + calls.written.format(name=name, index=0) + calls.args,
                _schema(tools[name]),
                calls.close,
            )
            for name in names
        ]
        return _in_section(format, each, many=many, separator="")
    if isinstance(calls, JsonCalls):
        return _in_section(
            format, [_object(calls, name, tools[name]) for name in names], many=parallel, separator=""
        )
    if isinstance(calls, TaggedCalls):
        each = [_tagged(calls, name, tools[name]) for name in names]
        return _in_section(format, each, many=parallel, separator="\n" if calls.open else "")
    return None


def after_reasoning(format: OutputFormat, form: Form) -> Form:
    """Return ``form`` after the rest of a reasoning section that the prompt has opened."""
    assert format.reasoning is not None
    return _sequence([_tag("", {"type": "any_text"}, format.reasoning[1]), _optional(_text("\n\n")), form])


def form_of(kind: str, value: Any) -> Form | None:
    """Return a form of structured output as an element of a structural tag; None if its kind cannot be one."""
    if kind == "json":
        return {"type": "json_schema", "json_schema": json.loads(value) if isinstance(value, str) else value}
    if kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if kind == "regex":
        return {"type": "regex", "pattern": value}
    if kind == "choice":
        return _either([_text(item) for item in value])
    return {"type": "grammar", "grammar": value} if kind == "grammar" else None


def _in_section(format: OutputFormat, each: Sequence[Form], *, many: bool, separator: str) -> Form:
    """Return calls between the section's marks. If each call has its own section, several calls make several."""
    opening, close = (format.opens or ("",))[0], (format.closes or ("",))[0]
    one = _either(each)
    if format.listed:
        inner = {"type": "tags_with_separator", "tags": list(each), "separator": ", ", "at_least_one": True}
        return _tag(opening + "[", inner if many else one, "]" + close)
    if many and isinstance(format.calls, JsonCalls | TaggedCalls) and close:
        wrapped = [
            _tag(opening + "\n" if format.spaced else opening, form, _closing(format, close)) for form in each
        ]
        return {"type": "tags_with_separator", "tags": wrapped, "separator": "\n", "at_least_one": True}
    if many and isinstance(format.calls, NamedCalls):
        inner = {
            "type": "tags_with_separator",
            "tags": list(each),
            "separator": separator,
            "at_least_one": True,
        }
        return _tag(opening, inner, close)
    spaced = "\n" if format.spaced else ""
    return _tag(opening + spaced, one, _closing(format, close))


def _closing(format: OutputFormat, close: str) -> str:
    return "\n" + close if close and format.spaced else close


def _object(calls: JsonCalls, name: str, schema: Mapping[str, Any]) -> Form:
    if calls.name_is_key:
        return _tag("{" + json.dumps(name) + ": ", _schema(schema), "}")
    return _tag(f'{{"name": {json.dumps(name)}, "{calls.argument_keys[0]}": ', _schema(schema), "}")


def _tagged(calls: TaggedCalls, name: str, schema: Mapping[str, Any]) -> Form:
    required = set(schema.get("required") or ())
    parts = []
    for key, kind in (schema.get("properties") or {}).items():
        begin = f"{calls.key}{key}{calls.key_end}{calls.value}"
        if is_text(kind) and "enum" not in kind:
            value = _tag(begin, {"type": "any_text"}, calls.value_end)
        elif is_text(kind):
            value = _tag(begin, _either([_text(str(item)) for item in kind["enum"]]), calls.value_end)
        else:
            value = _tag(begin, _schema(kind), calls.value_end)
        line = _sequence([value, _text("\n")])
        parts.append(line if key in required else _optional(line))
    head = _text(f"{calls.open}{name}{calls.name_end}\n")
    return _tag("", _sequence([head, *parts]), calls.close)


def _schema(schema: Any) -> Form:
    """Return the form of a tool's arguments, which are an object even for a tool without parameters."""
    return {"type": "json_schema", "json_schema": schema or {"type": "object", "properties": {}}}


def _tag(begin: str, content: Form, end: str) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _text(value: str) -> Form:
    return {"type": "const_string", "value": value}


def _sequence(elements: list[Form]) -> Form:
    return {"type": "sequence", "elements": elements}


def _either(elements: Sequence[Form]) -> Form:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def _optional(form: Form) -> Form:
    return _either([form, _text("")])

"""The grammar of an answer that must be tool calls, from the description with which the parser reads calls.

The result is a structural tag (`quire.text.grammar`): the format's marks, and arguments by the tool's schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quire.text.output.formats import (
    GemmaCalls,
    JsonCalls,
    NamedCalls,
    NestedCalls,
    OutputFormat,
    PythonCalls,
    TaggedCalls,
    Tools,
)
from quire.text.output.value_types import is_text, types_of

Form = dict[str, Any]
LARK = "x-lark"  # keyword of a string's schema: the Lark grammar of the text


def required_calls(
    format: OutputFormat, tools: Tools, names: Sequence[str], *, parallel: bool
) -> Form | None:
    """Return the form of an answer that calls one of ``names``, with ``parallel`` perhaps several times.

    None: calls cannot be required in this format.
    """
    calls, messages = format.calls, format.messages
    if messages is not None and calls is None:
        return _either([_tag(messages.written.format(name=name), _schema(tools[name]), "") for name in names])
    if calls is None:
        return None
    if messages is not None:  # a message calls one tool
        section = replace(format, messages=None)
        return _either(
            [
                _tag(messages.written.format(name=name), _calls(section, tools, [name], many=False), "")
                for name in names
            ]
        )
    many = parallel and "{index}" not in getattr(calls, "written", "")
    return _calls(format, tools, names, many=many)


def _calls(format: OutputFormat, tools: Tools, names: Sequence[str], *, many: bool) -> Form:
    calls, separator = format.calls, ""
    if isinstance(calls, NamedCalls):
        forms = [_named(calls, name, tools[name]) for name in names]
    elif isinstance(calls, JsonCalls):
        forms = [_object(calls, name, tools[name]) for name in names]
    elif isinstance(calls, TaggedCalls):
        forms = [_tagged(calls, name, tools[name]) for name in names]
        separator = "\n" if calls.open else ""
    elif isinstance(calls, NestedCalls):
        forms = [_nested(calls, name, tools[name]) for name in names]
        separator = "\n"
    elif isinstance(calls, PythonCalls):
        forms = [_tag(f"{name}(", _keywords(tools[name]), ")") for name in names]
    else:
        assert isinstance(calls, GemmaCalls)
        forms = [_tag(f"call:{name}{{", _bare_keys(calls, tools[name]), "}") for name in names]
    return _in_section(format, forms, many=many, separator=separator)


def calls_in_text(format: OutputFormat, tools: Tools) -> Form | None:
    """Return the form of free text in which each call of one of ``tools`` has its form.

    None: calls of this format do not begin with a mark, or have no form.
    """
    form = required_calls(format, tools, list(tools), parallel=False)
    tags = [] if form is None else form["elements"] if form["type"] == "or" else [form]
    trigger = (format.opens or (getattr(format.calls, "open", ""),))[0]
    if not (tags and trigger) or not all(tag.get("begin", "").startswith(trigger) for tag in tags):
        return None
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags}


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


def _in_section(format: OutputFormat, forms: Sequence[Form], *, many: bool, separator: str) -> Form:
    """Return calls between the section's marks. If each call has its own section, several calls make several."""
    opening, close = (format.opens or ("",))[0], (format.closes or ("",))[0]
    one = _either(forms)
    if format.listed:
        inner = {"type": "tags_with_separator", "tags": list(forms), "separator": ", ", "at_least_one": True}
        return _tag(opening + "[", inner if many else one, "]" + close)
    each_in_section = isinstance(format.calls, JsonCalls | TaggedCalls | NestedCalls | GemmaCalls) and opening
    if many and each_in_section:
        spaced = "\n" if format.spaced else ""
        wrapped = [_tag(opening + spaced, form, _closing(format, close)) for form in forms]
        return {"type": "tags_with_separator", "tags": wrapped, "separator": "\n", "at_least_one": True}
    if many and isinstance(format.calls, NamedCalls | PythonCalls | TaggedCalls):
        between = "\n" if isinstance(format.calls, PythonCalls) else separator
        inner = {
            "type": "tags_with_separator",
            "tags": list(forms),
            "separator": between,
            "at_least_one": True,
        }
        return _tag(opening, inner, close)
    spaced = "\n" if format.spaced else ""
    return _tag(opening + spaced, one, _closing(format, close))


def _closing(format: OutputFormat, close: str) -> str:
    return "\n" + close if close and format.spaced else close


def _named(calls: NamedCalls, name: str, schema: Mapping[str, Any]) -> Form:
    begin, end = calls.open + calls.written.format(name=name, index=0) + calls.args, calls.close
    if calls.inside:
        begin, end = f'{begin}{{"name": {json.dumps(name)}, "{calls.inside}": ', "}" + end
    return _tag(begin, _schema(schema), end)


def _object(calls: JsonCalls, name: str, schema: Mapping[str, Any]) -> Form:
    if calls.name_is_key:
        return _tag("{" + json.dumps(name) + ": ", _schema(schema), "}")
    begin = f'{{"{calls.name_keys[0]}": {json.dumps(name)}, "{calls.argument_keys[0]}": '
    return _tag(begin, _schema(schema), "}")


def _tagged(calls: TaggedCalls, name: str, schema: Mapping[str, Any]) -> Form:
    required = set(schema.get("required") or ())
    parts = []
    for key, kind in (schema.get("properties") or {}).items():
        text = is_text(kind, schema)
        type_name = next(iter(sorted(types_of(kind, schema))), "object")
        attributes = calls.text if text else calls.json.format(type=type_name)
        begin = f"{calls.key}{key}{calls.key_end}{attributes}{calls.value}"
        line = _sequence([_tag(begin, _text_or_json(kind, schema), calls.value_end), _text("\n")])
        parts.append(line if key in required else _optional(line))
    before, numbered, after = calls.attributes.partition("{index}")
    head = [_text(f"{calls.open}{name}{calls.name_end}{before}")]
    if numbered:
        head.append({"type": "regex", "pattern": "[1-9][0-9]?"})
    head.append(_text(after + "\n"))
    return _tag("", _sequence([*head, *parts]), calls.close)


def _text_or_json(kind: Any, root: Mapping[str, Any]) -> Form:
    """Return the form of a value in tags: text without quotes, or JSON."""
    if not is_text(kind, root):
        return _rooted(kind, root)
    if LARK in kind:
        return {"type": "grammar", "grammar": kind[LARK]}
    if "enum" in kind:
        return _either([_text(str(item)) for item in kind["enum"]])
    return _text(str(kind["const"])) if "const" in kind else {"type": "any_text"}


def _nested(calls: NestedCalls, name: str, schema: Mapping[str, Any]) -> Form:
    required = set(schema.get("required") or ())
    parts = []
    for key, kind in (schema.get("properties") or {}).items():
        line = _sequence([_element(calls, key, kind, schema), _text("\n")])
        parts.append(line if key in required else _optional(line))
    return _tag("", _sequence([_text(f"{calls.open}{name}{calls.name_end}\n"), *parts]), calls.close)


# Keywords of schemas whose values are written as elements; JSON in the element obeys all others.
_PLAIN = {
    "type",
    "description",
    "title",
    "default",
    "properties",
    "required",
    "additionalProperties",
    "items",
}


def _element(calls: NestedCalls, key: str, kind: Any, root: Mapping[str, Any]) -> Form:
    begin, end = f"{calls.prefix}<{key}>", f"{calls.prefix}</{key}>"
    plain = isinstance(kind, Mapping) and _PLAIN.issuperset(kind)
    if plain and kind.get("type") == "object" and kind.get("properties"):
        required = set(kind.get("required") or ())
        inside = [(name, _element(calls, name, inner, root)) for name, inner in kind["properties"].items()]
        return _tag(begin, _sequence([form if n in required else _optional(form) for n, form in inside]), end)
    if plain and kind.get("type") == "array" and isinstance(kind.get("items"), Mapping):
        item = _tag("", _element(calls, "item", kind["items"], root), "")
        return _tag(begin, {"type": "tags_with_separator", "tags": [item], "separator": ""}, end)
    return _tag(begin, _text_or_json(kind, root), end)


def _keywords(schema: Mapping[str, Any]) -> Form:
    """Return the form of a Python call's arguments: JSON values, which the parser reads in Python as well."""
    forms = {key: _tag(f"{key}=", _rooted(kind, schema), "") for key, kind in _properties(schema)}
    return _listed(forms, schema, ", ")


def _bare_keys(calls: GemmaCalls, schema: Mapping[str, Any]) -> Form:
    forms = {}
    for key, kind in _properties(schema):
        form = _text_or_json(kind, schema)
        quote = calls.quote if is_text(kind, schema) else ""
        forms[key] = _tag(f"{key}:{quote}", form, quote)
    return _listed(forms, schema, ",")


def _properties(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return list((schema.get("properties") or {}).items())


def _listed(forms_by_key: Mapping[str, Form], schema: Mapping[str, Any], separator: str) -> Form:
    """Return the form of ``forms_by_key`` with separators between them: the required ones, then any of the others."""
    names = set(schema.get("required") or ())
    required = [form for key, form in forms_by_key.items() if key in names]
    others = [form for key, form in forms_by_key.items() if key not in names]

    def more(forms: Sequence[Form]) -> list[Form]:
        return [_optional(_sequence([_text(separator), form])) for form in forms]

    if required:
        joined = [part for form in required for part in (_text(separator), form)][1:]
        return _sequence([*joined, *more(others)])
    first = [_sequence([form, *more(others[i + 1 :])]) for i, form in enumerate(others)]
    return _either([*first, _text("")])


def _rooted(kind: Any, root: Mapping[str, Any]) -> Form:
    """Return the form of JSON by the schema of a part of ``root``, with the definitions that it may refer to."""
    if not isinstance(kind, Mapping):
        return {"type": "json_schema", "json_schema": {}}
    if LARK in kind:
        return _tag('"', {"type": "grammar", "grammar": kind[LARK], "in_json": True}, '"')
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {"type": "json_schema", "json_schema": {**definitions, **kind}}


def _schema(schema: Any) -> Form:
    """Return the form of a tool's arguments, which are an object even for a tool without parameters."""
    for key, kind in _properties(schema or {}):
        if isinstance(kind, Mapping) and LARK in kind:  # a tool whose one argument is a text
            return _tag("{" + json.dumps(key) + ": ", _rooted(kind, schema), "}")
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

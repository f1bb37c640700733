"""From `StructuredOutputsParams` to the grammar that is sent to the worker: text that llguidance compiles.

`grammar_source` is cheap and runs where the request arrives. `build_grammar` parses what a client wrote, so it runs
only in the helper process of `quire.engine.helper_pool`.

Structural tags (vLLM's, from XGrammar) are free text in which tagged sections have a form. Both forms are read:
``{"structures": [{begin, schema, end}], "triggers": […]}`` and the newer ``{"format": {…}}``. Free text ends at the
first trigger or end string, so the constraint applies from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError, nearest
from quire.structured_outputs import StructuredOutputsParams
from quire.text.closed_objects import closed
from quire.text.grammar_matcher import as_lark
from quire.text.json_schema import relaxed, written_out
from quire.text.lark_in_json import lark_in_json, quoted
from quire.text.number_ranges import written_ranges
from quire.text.schema_check import SchemaCheck
from quire.text.schema_negation import NoForm
from quire.text.schema_values import without_empty

MAX_SOURCE_BYTES = 1 << 20
# Between two tokens of JSON: nothing, one space, or a line break with its indentation. JSON itself allows any run of
# spaces, and small models then write spaces for ever.
WHITESPACE = r"( |\n[ \t]{0,40})"


def grammar_source(params: StructuredOutputsParams) -> str:
    """Return ``params`` as one text for the helper.

    Raises:
        RequestError: the text is larger than `MAX_SOURCE_BYTES`, or nested more deeply than Python can serialize.
    """
    kind = params.kind
    fields = {
        "kind": kind,
        "value": getattr(params, kind),
        "whitespace": None if params.disable_any_whitespace else params.whitespace_pattern or WHITESPACE,
        "closed": params.disable_additional_properties is not False,
    }
    try:
        text = json.dumps(fields)
    except RecursionError:
        raise params.wrong(f"{params.param}: {kind} is nested too deeply.") from None
    except (TypeError, ValueError) as error:  # offline: a dict may hold anything
        raise params.wrong(f"{params.param}: {kind} is no JSON: {error}.") from None
    if len(text) > MAX_SOURCE_BYTES:
        raise params.wrong(
            f"{params.param}: {kind} has {len(text)} bytes; at most {MAX_SOURCE_BYTES} are allowed."
        )
    return text


# How a JSON schema becomes a grammar: as it is; relaxed, with the rest watched (`quire.text.json_watch`); relaxed
# without alternatives; rewritten (`quire.text.json_schema`). Each is tried where the one before was rejected.
NUM_LEVELS = 4


def build_grammar(source: str, level: int = 0) -> str:
    """Return the grammar of a `grammar_source`, in the text form of llguidance.

    ``level``: of `NUM_LEVELS`, for a JSON schema. Behind the grammar of a relaxed schema, on a line of its own, stands
    the schema (`quire.text.grammar_matcher.watch_grammar`).

    Raises:
        RequestError: the source cannot be a grammar. Many errors show only when the result is compiled.
    """
    fields = json.loads(source)
    value, options = fields["value"], _options(fields["whitespace"])
    match fields["kind"]:
        case "json":
            schema = _parsed(value)
            if not isinstance(schema, dict):
                raise RequestError(f"the schema is {schema!r:.60}; it must be an object")
            schema = closed(schema) if fields["closed"] else schema
            return _at_level(without_empty(schema), level, options)
        case "json_object":
            return _json_grammar({"type": "object"}, options)
        case "choice":
            return _lark("start: " + " | ".join(map(quoted, value)))
        case "regex":
            return _lark(f"start: /{slashed(value)}/")
        case "structural_tag":
            return lark_of_structural_tag(_parsed(value), options, closes=fields["closed"])
    return _lark(as_lark(value))


def _at_level(schema: dict[str, Any], level: int, options: dict[str, Any]) -> str:
    if level in (0, 3):
        return _json_grammar(written_out(schema, schema) if level else schema, options)
    try:
        SchemaCheck(schema, lambda keyword, value, text: True)
        made = relaxed(schema, alternatives=level == 1)
    except NoForm:
        raise RequestError("the schema has keywords that cannot be watched") from None
    return _json_grammar(made, options) + "\n" + json.dumps(schema)


def _json_grammar(schema: Any, options: dict[str, Any]) -> str:
    # These options replace any in the schema: with "lenient" llguidance would ignore keywords that it does not know.
    if not isinstance(schema, dict):
        raise RequestError("nothing is valid under the schema")
    return json.dumps({"grammars": [{"json_schema": {**written_ranges(schema), "x-guidance": options}}]})


def _options(whitespace: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": False}
    if whitespace is None:
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = whitespace
    return options


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _parsed(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise RequestError(f"the text is no JSON: {error}") from None


TEXT = r"/(.|\n)*/"
FORMATS = (
    "const_string", "json_schema", "any_text", "regex", "grammar", "sequence", "or", "tag", "triggered_tags",
    "tags_with_separator",
)  # fmt: skip


def lark_of_structural_tag(spec: Any, options: Mapping[str, Any], *, closes: bool = True) -> str:
    """Return the grammar of ``spec``; ``options`` are put into each of its JSON schemas, whose objects it ``closes``.

    Raises:
        RequestError: an element is missing, has the wrong type or an unknown kind; names its path.
    """
    if not isinstance(spec, dict):
        raise RequestError(f"the structural tag is {spec!r:.60}; it must be an object")
    form = spec.get("format")
    if form is None:
        tags = [
            {**structure, "content": {"type": "json_schema", "json_schema": structure.get("schema")}}
            for structure in _objects(spec, "structures", "")
        ]
        form = {"type": "triggered_tags", "triggers": spec.get("triggers"), "tags": tags}
    emitter = _Emitter(options, closes=closes)
    return emitter.grammar(emitter.rule(form, "format"))


class _Emitter:
    """Collects the rules of one Lark grammar; every method returns the name or the body of a rule."""

    def __init__(self, options: Mapping[str, Any], *, closes: bool) -> None:
        self._options = options
        self._closes = closes
        self._lines: list[str] = []
        self._inner: list[dict[str, str]] = []  # separate grammars, referred to by name

    def grammar(self, start: str) -> str:
        lark = "\n".join([f"start: {start}", *self._lines])
        return json.dumps({"grammars": [{"name": "start", "lark_grammar": lark}, *self._inner]})

    def rule(self, form: Any, path: str) -> str:
        """Return the name of a rule that matches ``form``."""
        if not isinstance(form, dict) or form.get("type") not in FORMATS:
            kind = form.get("type") if isinstance(form, dict) else form
            near = nearest(str(kind), FORMATS)
            raise RequestError(f"{path}.type is {kind!r:.60}; it must be one of {', '.join(FORMATS)}{near}")
        body: str = getattr(self, f"_{form['type']}")(form, path)
        return self._name(body)

    def _name(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {body}")
        return name

    def _const_string(self, form: dict[str, Any], path: str) -> str:
        return quoted(_text(form, "value", path))

    def _json_schema(self, form: dict[str, Any], path: str) -> str:
        schema = form.get("json_schema")
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise RequestError(f"{path}.json_schema is {schema!r:.60}; it must be a JSON schema")
        schema = without_empty(closed(schema) if self._closes else schema)
        return "%json " + json.dumps({**written_ranges(schema), "x-guidance": self._options})

    def _any_text(self, form: dict[str, Any], path: str) -> str:
        return TEXT

    def _regex(self, form: dict[str, Any], path: str) -> str:
        return f"/{slashed(_text(form, 'pattern', path))}/"

    def _grammar(self, form: dict[str, Any], path: str) -> str:
        name = f"g{len(self._inner)}"
        lark = as_lark(_text(form, "grammar", path))
        self._inner.append(
            {"name": name, "lark_grammar": lark_in_json(lark) if form.get("in_json") is True else lark}
        )
        return f"@{name}"

    def _sequence(self, form: dict[str, Any], path: str) -> str:
        return " ".join(self._elements(form, path))

    def _or(self, form: dict[str, Any], path: str) -> str:
        return " | ".join(self._elements(form, path))

    def _elements(self, form: dict[str, Any], path: str) -> list[str]:
        items = _objects(form, "elements", path)
        return [self.rule(item, f"{path}.elements[{i}]") for i, item in enumerate(items)]

    def _tag(self, form: dict[str, Any], path: str, begin_from: int = 0) -> str:
        """``begin_from``: how many characters of ``begin`` a trigger has already matched."""
        begin = _text(form, "begin", path)[begin_from:]
        end = _text(form, "end", path)
        content = form.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            inside = self._name(f"{TEXT} {quoted(end)}", "[lazy]")
            return f"{quoted(begin)} {inside}"
        return f"{quoted(begin)} {self.rule(content, f'{path}.content')} {quoted(end)}"

    def _triggered_tags(self, form: dict[str, Any], path: str) -> str:
        triggers = _texts(form, "triggers", path)
        options = []
        for i, tag in enumerate(_objects(form, "tags", path)):
            begin = _text(tag, "begin", f"{path}.tags[{i}]")
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise RequestError(
                    f"{path}.tags[{i}].begin = {begin!r:.60} begins with none of the triggers {triggers}"
                )
            free = self._name(f"{TEXT} {quoted(trigger)}", "[lazy]")
            options.append(self._name(f"{free} {self._tag(tag, f'{path}.tags[{i}]', len(trigger))}"))
        one = self._name(" | ".join(options))
        least = form.get("at_least_one") is True
        if form.get("stop_after_first") is True:
            return one if least else f"{one} | {TEXT}"
        return f"{one}{'+' if least else '*'} {self._name(TEXT)}"

    def _tags_with_separator(self, form: dict[str, Any], path: str) -> str:
        tags = _objects(form, "tags", path)
        one = self._name(
            " | ".join(self._name(self._tag(t, f"{path}.tags[{i}]")) for i, t in enumerate(tags))
        )
        separator = quoted(_text(form, "separator", path))
        many = one if form.get("stop_after_first") is True else f"{one} ({separator} {one})*"
        return many if form.get("at_least_one") is True else f"({many})?"


def slashed(regex: str) -> str:
    """Escape the slashes of a regex, which end it in Lark, and line breaks, which Lark does not allow in it."""
    made, escaped = [], False
    for char in regex:
        if char == "/" and not escaped:
            made.append("\\/")
        elif char == "\n":
            made.append("n" if escaped else "\\n")
        else:
            made.append(char)
        escaped = char == "\\" and not escaped
    return "".join(made)


def _text(form: dict[str, Any], key: str, path: str) -> str:
    value = form.get(key)
    if not isinstance(value, str):
        raise RequestError(f"{path}.{key} is {value!r:.60}; it must be a string")
    return value


def _texts(form: dict[str, Any], key: str, path: str) -> Sequence[str]:
    value = form.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
        raise RequestError(f"{path}.{key} is {value!r:.60}; it must be a list of non-empty strings")
    return value


def _objects(form: dict[str, Any], key: str, path: str) -> list[dict[str, Any]]:
    value = form.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
        where = f"{path}.{key}" if path else key
        raise RequestError(f"{where} is {value!r:.60}; it must be a list of at least one object")
    return value

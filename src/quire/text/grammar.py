"""From `StructuredOutputsParams` to the grammar that crosses to the worker: text that llguidance compiles.

`grammar_source` is cheap and total; it runs where the request arrives. `build_grammar` parses what a stranger wrote, so
it runs in the helper process of `quire.engine.grammar_check` alone.
"""

from __future__ import annotations

import json
from typing import Any

from quire.errors import RequestError
from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammar_matcher import as_lark
from quire.text.json_schema import closed, written_out
from quire.text.structural_tag import lark_of_structural_tag, slashed

MAX_SOURCE_BYTES = 1 << 20
# Between two tokens of JSON: nothing, one space, or a line break with its indentation. JSON's own rule, any run of
# spaces, is where small models lose themselves for ever.
WHITESPACE = r"( |\n[ \t]{0,40})"


def grammar_source(params: StructuredOutputsParams) -> str:
    """Return ``params`` as one text for the helper.

    Raises:
        RequestError: it is larger than `MAX_SOURCE_BYTES`, or nested deeper than Python can write.
    """
    kind = params.kind
    said = {
        "kind": kind,
        "value": getattr(params, kind),
        "whitespace": None if params.disable_any_whitespace else params.whitespace_pattern or WHITESPACE,
        "closed": params.disable_additional_properties,
    }
    try:
        text = json.dumps(said)
    except RecursionError:
        raise params.wrong(f"{params.param}: {kind} is nested too deeply.") from None
    except (TypeError, ValueError) as error:  # offline: a dict may hold anything
        raise params.wrong(f"{params.param}: {kind} is no JSON: {error}.") from None
    if len(text) > MAX_SOURCE_BYTES:
        raise params.wrong(
            f"{params.param}: {kind} has {len(text)} bytes; at most {MAX_SOURCE_BYTES} are allowed."
        )
    return text


def build_grammar(source: str, *, write_out: bool = False) -> str:
    """Return the grammar of a `grammar_source`, in the text form of llguidance.

    ``write_out``: say a JSON schema in simpler words (`quire.text.json_schema`), where the compiler has refused it.

    Raises:
        RequestError: what the source says cannot be a grammar. Much is found only by compiling the result.
    """
    said = json.loads(source)
    value, options = said["value"], _options(said["whitespace"])
    match said["kind"]:
        case "json":
            schema = _parsed(value)
            if not isinstance(schema, dict):
                raise RequestError(f"the schema is {schema!r:.60}; it must be an object")
            schema = closed(schema) if said["closed"] else schema
            return _json_grammar(written_out(schema, schema) if write_out else schema, options)
        case "json_object":
            return _json_grammar({"type": "object"}, options)
        case "choice":
            return _lark("start: " + " | ".join(json.dumps(item, ensure_ascii=False) for item in value))
        case "regex":
            return _lark(f"start: /{slashed(value)}/")
        case "structural_tag":
            return lark_of_structural_tag(_parsed(value), options)
    return _lark(as_lark(value))


def _json_grammar(schema: Any, options: dict[str, Any]) -> str:
    # The options replace any that the schema brings: "lenient" would drop what the compiler does not know.
    if not isinstance(schema, dict):
        raise RequestError("nothing is valid under the schema")
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": options}}]})


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

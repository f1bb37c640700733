"""From `StructuredOutputsParams` to the grammar that is sent to the worker: text that llguidance compiles.

`grammar_source` is cheap and runs where the request arrives. `build_grammar` parses what a client wrote, so it runs
only in the helper process of `quire.engine.helper_pool`.
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
# Between two tokens of JSON: nothing, one space, or a line break with its indentation. JSON itself allows any run of
# spaces, and small models then write spaces for ever.
WHITESPACE = r"( |\n[ \t]{0,40})"


def grammar_source(params: StructuredOutputsParams) -> str:
    """Return ``params`` as one text for the helper.

    Raises:
        RequestError: the text is larger than `MAX_SOURCE_BYTES`, or nested more deeply than Python can serialize.
    """
    kind = params.kind
    given = {
        "kind": kind,
        "value": getattr(params, kind),
        "whitespace": None if params.disable_any_whitespace else params.whitespace_pattern or WHITESPACE,
        "closed": params.disable_additional_properties,
    }
    try:
        text = json.dumps(given)
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

    ``write_out``: rewrite a JSON schema in simpler keywords (`quire.text.json_schema`), for one that llguidance
    rejected.

    Raises:
        RequestError: the source cannot be a grammar. Many errors show only when the result is compiled.
    """
    given = json.loads(source)
    value, options = given["value"], _options(given["whitespace"])
    match given["kind"]:
        case "json":
            schema = _parsed(value)
            if not isinstance(schema, dict):
                raise RequestError(f"the schema is {schema!r:.60}; it must be an object")
            schema = closed(schema) if given["closed"] else schema
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
    # These options replace any in the schema: with "lenient" llguidance would ignore keywords that it does not know.
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

"""Objects that name properties are closed unless the schema says otherwise; each closed value is valid as written."""

from __future__ import annotations

import random
from typing import Any

import jsonschema
import pytest
from tests.engine.toy import EOS, VOCAB, byte_tokenizer

from quire.errors import RequestError
from quire.structured_outputs import StructuredOutputsParams
from quire.text.closed_objects import closed
from quire.text.grammar import build_grammar, grammar_source
from quire.text.grammar_matcher import compile_matcher, ll_tokenizer
from quire.text.token_table import token_table

LLTOKENIZER = ll_tokenizer(token_table(byte_tokenizer(), VOCAB, (EOS,)))
NAMED = {"properties": {"a": {}}}
CLOSED = {**NAMED, "additionalProperties": False}
OTHER = {"properties": {"b": {}}}
CLOSED_OTHER = {**OTHER, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (NAMED, CLOSED),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"anyOf": [NAMED, OTHER]}, {"anyOf": [CLOSED, CLOSED_OTHER]}),
        ({"allOf": [NAMED], "title": "x"}, {"allOf": [CLOSED], "title": "x"}),
        ({"items": NAMED}, {"items": CLOSED}),
        ({"$ref": "#/x/y", "x": {"y": NAMED}}, {"$ref": "#/x/y", "x": {"y": CLOSED}}),
        (
            {**NAMED, "required": ["a", "c"]},
            {"properties": {"a": {}, "c": {}}, "required": ["a", "c"], "additionalProperties": False},
        ),
        (
            {"required": ["c"], "allOf": [NAMED]},
            {"required": ["c"], "allOf": [{"properties": {"a": {}, "c": {}}, "additionalProperties": False}]},
        ),
        (
            {"oneOf": [{**NAMED, "type": "object", "required": ["a"]}, {"type": "null"}]},
            {"oneOf": [{**CLOSED, "type": "object", "required": ["a"]}, {"type": "null"}]},
        ),
    ],
)
def test_objects_that_name_properties_are_closed(schema: Any, expected: Any) -> None:
    assert closed(schema) == expected
    assert closed(expected) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**NAMED, "additionalProperties": True},
        {**NAMED, "additionalProperties": {"type": "string"}},
        {**NAMED, "additionalProperties": {}},
        {**NAMED, "patternProperties": {"^x": {}}},
        {**NAMED, "minProperties": 2},
        {"allOf": [NAMED, OTHER]},
        {**NAMED, "anyOf": [OTHER, {"required": ["a"]}]},
        {"allOf": [{"$ref": "#/$defs/x"}, OTHER], "$defs": {"x": NAMED}},
        {**NAMED, "$ref": "#/$defs/x", "$defs": {"x": OTHER}},
        {"allOf": [NAMED, {"additionalProperties": {"type": "string"}}]},
        {**NAMED, "if": NAMED, "then": OTHER},
        {**NAMED, "dependentSchemas": {"a": OTHER}},
        {"not": NAMED, "if": NAMED, "contains": NAMED},
        {"oneOf": [NAMED, OTHER]},
        {"allOf": [{"items": NAMED}, {"items": OTHER}]},
        {"$ref": "https://elsewhere/x", **NAMED},
    ],
)
def test_a_schema_can_say_that_its_objects_are_open(schema: Any) -> None:
    assert closed(schema) == schema


def _random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if rng.random() < 0.6:
        made["properties"] = {
            name: rng.choice([{}, {"const": name}, {"type": "integer"}, _random_schema(rng, depth + 1)])
            if depth < 2
            else {}
            for name in rng.sample("abc", rng.randint(0, 2))
        }
    if rng.random() < 0.3:
        made["required"] = rng.sample("abc", 1)
    if rng.random() < 0.15:
        made["additionalProperties"] = rng.choice([True, False, {"type": "integer"}])
    if rng.random() < 0.2:
        made["type"] = rng.choice(["object", "integer", ["object", "null"]])
    if depth < 2:
        for key in ("allOf", "anyOf", "oneOf"):
            if rng.random() < 0.2:
                made[key] = [_random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
        for key in ("not", "if", "then", "else"):
            if rng.random() < 0.1:
                made[key] = _random_schema(rng, depth + 1)
        if rng.random() < 0.1:
            made["$ref"] = "#/$defs/d"
    if depth == 0:
        made["$defs"] = {"d": _random_schema(rng, 1)}
    return made


def _random_value(rng: random.Random, depth: int = 0) -> Any:
    if depth == 3 or (depth and rng.random() < 0.4):
        return rng.choice([1, None, "a", "b", {}])
    return {name: _random_value(rng, depth + 1) for name in rng.sample("abcd", rng.randint(0, 3))}


@pytest.mark.parametrize("num_schemas", [400, pytest.param(1500, marks=pytest.mark.slow)])
def test_closing_is_never_wider_than_the_schema(num_schemas: int) -> None:
    num_valid = 0
    for seed in range(num_schemas):
        rng = random.Random(seed)
        schema = _random_schema(rng)
        as_written = jsonschema.Draft202012Validator(schema)
        narrower = jsonschema.Draft202012Validator(closed(schema))
        for _ in range(12):
            value = _random_value(rng)
            try:
                is_valid = narrower.is_valid(value)
            except RecursionError:  # a reference that leads back to itself
                break
            num_valid += is_valid
            assert not is_valid or as_written.is_valid(value), f"seed {seed}: {schema} {value}"
    assert num_valid > num_schemas // 2


def _takes(params: StructuredOutputsParams, text: str) -> bool:
    matcher = compile_matcher(LLTOKENIZER, build_grammar(grammar_source(params)))
    return bool(matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting())


def test_false_gives_json_schema_to_the_letter() -> None:
    schema = {"type": "object", **NAMED}
    for option, is_open in ((None, False), (True, False), (False, True)):
        params = StructuredOutputsParams(json=schema, disable_additional_properties=option)
        tag = StructuredOutputsParams(
            structural_tag={"format": {"type": "json_schema", "json_schema": schema}},
            disable_additional_properties=option,
        )
        for form in (params, tag):
            assert _takes(form, '{"a": 1}')
            assert _takes(form, '{"a": 1, "b": 2}') is is_open
    with pytest.raises(RequestError, match="disable_additional_properties belongs to json"):
        StructuredOutputsParams(regex="a", disable_additional_properties=True)

"""Schemas that cannot be met are refused by keyword; ranges of numbers hold as they are written."""

from __future__ import annotations

import random
from decimal import Decimal
from typing import Any

import pytest
from tests.engine.toy import EOS, VOCAB, byte_tokenizer

from quire.errors import RequestError
from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammar import build_grammar, grammar_source
from quire.text.grammar_matcher import compile_matcher, first_error, ll_tokenizer
from quire.text.token_table import token_table

LLTOKENIZER = ll_tokenizer(token_table(byte_tokenizer(), VOCAB, (EOS,)))
ENDLESS = {"type": "object", "properties": {"i": {"$ref": "#/$defs/x"}}, "required": ["i"]}
EACH_OTHER = {
    "$defs": {
        "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
        "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]},
    },
    "$ref": "#/$defs/a",
}


def _grammar(schema: Any) -> str:
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    return build_grammar(grammar_source(params))


def _takes(schema: Any, *texts: str) -> list[bool]:
    """For each text: whether it is a whole answer."""
    matcher = compile_matcher(LLTOKENIZER, _grammar(schema))
    assert not first_error(matcher)
    found = []
    for text in texts:
        trial = matcher.deep_copy()
        found.append(trial.try_consume_tokens(list(text.encode())) == len(text) and trial.is_accepting())
    return found


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (EACH_OTHER, r"required: nothing is valid as property '[ab]'.*without a way out"),
        ({"$ref": "#"}, r"#: \$ref leads back to itself"),
        ({"type": "number", "minimum": 5, "maximum": 3}, r"minimum = 5 and maximum = 3 leave no number"),
        ({"type": "number", "exclusiveMinimum": 3, "maximum": 3}, "exclusiveMinimum = 3 and maximum = 3"),
        ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, "leave nothing of type 'integer'"),
        ({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5}, "leave nothing of multipleOf = 5"),
        ({"properties": {"n": {"type": "string", "minLength": 3, "maxLength": 2}}, "required": ["n"],
          "type": "object"}, r"#/properties/n: minLength = 3 is above maxLength = 2"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "minItems = 3 is above maxItems = 1"),
        ({"type": "array", "minItems": 1, "items": False}, "minItems = 1: nothing is valid as item 0"),
        ({"type": "array", "contains": False}, "contains: nothing is valid under it"),
        ({"type": "object", "maxProperties": 1, "required": ["a", "b"]}, "maxProperties = 1 is below the 2 names"),
        ({"type": "object", "additionalProperties": False, "required": ["a"]}, "required: .* property 'a'"),
        ({"enum": ["a", 2.5], "type": "integer"}, "enum: none of its values is valid"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "no type is left"),
        ({"anyOf": [{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}]}, "anyOf: nothing"),
    ],
)  # fmt: skip
def test_what_cannot_be_met_names_the_keyword(schema: Any, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        _grammar(schema)
    form = {"format": {"type": "json_schema", "json_schema": schema}}
    with pytest.raises(RequestError, match=said):
        build_grammar(grammar_source(StructuredOutputsParams(structural_tag=form)))


def test_recursion_with_a_way_out_is_unbounded() -> None:
    optional = {"type": "object", "properties": {"n": {"$ref": "#"}}}
    nullable = {
        **optional,
        "properties": {"n": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["n"],
    }
    tree = {"type": "array", "items": {"$ref": "#"}}
    assert _takes(optional, "{}", '{"n":' * 30 + "{}" + "}" * 30) == [True, True]
    assert _takes(nullable, "{}", '{"n":' * 30 + "null" + "}" * 30) == [False, True]
    assert _takes(tree, "[" * 30 + "]" * 30) == [True]


def test_what_has_no_end_is_never_begun() -> None:
    schema = {"type": "object", "properties": {"v": {"type": "integer"}, "x": {"$ref": "#/$defs/x"}},
              "$defs": {"x": ENDLESS}}  # fmt: skip
    matcher = compile_matcher(LLTOKENIZER, _grammar(schema))
    assert _takes(schema, '{"v":1}') == [True]
    assert matcher.try_consume_tokens(list(b'{"v":1,')) < 7
    options = {"anyOf": [ENDLESS, {"type": "null"}], "$defs": {"x": ENDLESS}}
    assert compile_matcher(LLTOKENIZER, _grammar(options)).try_consume_tokens(list(b"{")) == 0


def test_excluded_bounds_are_not_written() -> None:
    low = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}
    assert _takes(low, "0", "0.0", "0.5", "0.001", "0.51") == [False, False, True, True, False]
    high = {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}
    assert _takes(high, "0", "-0", "-0.5", "-0.001") == [False, False, True, True]


def test_ranges_hold_for_every_number_of_digits() -> None:
    wrong = []
    for seed in range(150):
        rng = random.Random(seed)
        low, high = sorted(Decimal(rng.randint(-2500, 2500)) / rng.choice([1000, 100, 10]) for _ in range(2))
        if rng.random() < 0.4:
            low, high = Decimal(int(low)), Decimal(int(low)) + Decimal(rng.randint(1, 99)) / 100
        lower, upper = (
            rng.choice(["minimum", "exclusiveMinimum"]),
            rng.choice(["maximum", "exclusiveMaximum"]),
        )
        if low == high:
            continue
        schema = {"type": "number", lower: float(low), upper: float(high)}
        values = {
            base + step
            for base in (low, high, Decimal(0), Decimal(round(low, 1)))
            for step in map(Decimal, ("0", "0.1", "-0.1", "0.01", "-0.01", "0.001", "-0.001", "1", "-1"))
        }
        texts = [format(value.normalize(), "f") for value in values]
        for text, taken in zip(texts, _takes(schema, *texts), strict=True):
            value = Decimal(text)
            inside = low <= value <= high and not (
                (value == low and lower[0] == "e") or (value == high and upper[0] == "e")
            )
            if taken != inside:
                wrong.append((seed, schema, text))
    assert wrong == []

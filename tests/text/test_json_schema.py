"""Rewritten schemas: all text of their grammar is valid for `jsonschema`; keywords that stay are rejected by name."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tests.engine.toy import EOS, VOCAB, byte_tokenizer

from quire.errors import RequestError
from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammar import NUM_LEVELS, build_grammar, grammar_source
from quire.text.grammar_matcher import (
    GrammarConstraint,
    accepts,
    compile_matcher,
    first_error,
    ll_tokenizer,
    watch_grammar,
)
from quire.text.json_schema import written_out
from quire.text.json_watch import Vocabulary
from quire.text.schema_negation import NoForm, negate
from quire.text.token_table import token_table

SEED = 20261121
TABLE = token_table(byte_tokenizer(), VOCAB, (EOS,))
LLTOKENIZER = ll_tokenizer(TABLE)
VOCABULARY = Vocabulary(TABLE.tokens)
REWRITTEN = (0, 3)
PERSON = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y", None]}, "c": {"type": "boolean"}},
}
WRITTEN_OUT: list[dict[str, Any]] = [
    {"type": ["string", "integer", "null"], "not": {"type": "string"}},
    {"type": "string", "maxLength": 4, "not": {"enum": ["a", "ab", "", "b\n"]}},
    {"type": "integer", "minimum": 0, "maximum": 9, "not": {"enum": [3, 5]}},
    {"type": "integer", "not": {"minimum": 3}, "minimum": -4},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 3, "not": {"maxItems": 1}},
    {**PERSON, "not": {"required": ["a", "b"]}},
    {**PERSON, "not": {"properties": {"a": {"minimum": 5}}, "required": ["a"]}},
    {**PERSON, "dependentRequired": {"a": ["b", "c"]}},
    {**PERSON, "dependencies": {"a": {"required": ["c"], "properties": {"c": {"const": True}}}}},
    {**PERSON, "if": {"properties": {"c": {"const": True}}, "required": ["c"]}, "then": {"required": ["a"]},
     "else": {"properties": {"a": False}}},
    {**PERSON, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3, "maximum": 9}], "minimum": 0},
    {"$defs": {"n": {"type": "integer", "minimum": 1}}, "type": "integer", "minimum": -5, "not": {"$ref": "#/$defs/n"}},
    {**PERSON, "anyOf": [{"not": {"required": ["a"]}}, {"not": {"not": {"required": ["b"]}}}]},
    {"type": "string", "format": "colour", "maxLength": 5},
    {"type": "array", "items": {"enum": [1, 2]}, "contains": {"minimum": 2}, "maxItems": 4},
    {"contains": {"const": 1}, "maxItems": 2, "maxLength": 2, "maximum": 7, "additionalProperties": False},
]  # fmt: skip


def grammar_of(schema: Any, levels: Sequence[int] = range(NUM_LEVELS)) -> str | None:
    """As the helper does: the schema unchanged, else relaxed or rewritten; None if all are rejected."""
    source = grammar_source(
        StructuredOutputsParams(
            json=json.dumps(schema), disable_any_whitespace=True, disable_additional_properties=False
        )
    )
    for level in levels:
        try:
            grammar = build_grammar(source, level)
        except RequestError:
            continue
        if not first_error(compile_matcher(LLTOKENIZER, grammar)):
            return grammar
    return None


def walk(grammar: str, rng: random.Random) -> str | None:
    """Return a random text of the grammar, with short strings and numbers; None if it does not end."""
    watch = watch_grammar(LLTOKENIZER, grammar, VOCABULARY)
    matcher = compile_matcher(LLTOKENIZER, grammar)
    constraint = GrammarConstraint(matcher, VOCAB, watch=watch, eos_ids=frozenset([EOS]))
    ids: list[int] = []
    while len(ids) < 400:
        mask = np.ones(VOCAB, np.bool_)
        constraint.mask(mask)
        allowed = np.flatnonzero(mask).tolist()
        if not allowed:
            return None
        likely = [i for i in allowed if i == EOS or chr(i) in '"}],09'] or allowed
        token_id = rng.choice(likely if rng.random() < 0.6 else [i for i in allowed if i < 128] or allowed)
        if token_id == EOS:
            return bytes(ids).decode()
        constraint.advance(token_id)
        ids.append(token_id)
    return None


def takes(grammar: str, value: Any) -> bool:
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return accepts(LLTOKENIZER, grammar, VOCABULARY, list(data))


@pytest.mark.parametrize("num_walks", [12, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("levels", [REWRITTEN, range(NUM_LEVELS)])
@pytest.mark.parametrize("case", range(len(WRITTEN_OUT)))
def test_what_the_grammar_draws_is_valid(case: int, levels: Sequence[int], num_walks: int) -> None:
    schema = WRITTEN_OUT[case]
    grammar = grammar_of(schema, levels)
    assert grammar is not None, schema
    rng = random.Random(SEED + case)
    texts: set[str] = set()
    for count in range(40):
        if count >= num_walks and len(texts) > 1:
            break
        if (text := walk(grammar, rng)) is not None:
            texts.add(text)
    assert len(texts) > 1, "the grammar allows next to nothing"
    for text in texts:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_nothing_is_lost_where_the_opposite_has_a_form() -> None:
    for case, values in {1: ["c", "abc", "ba"], 2: [0, 4, 9], 5: [{}, {"a": 1}, {"b": "x", "c": True}], 10: [{"a": 1}],
                         7: [{"b": None}, {"a": 1, "b": "x", "c": False}]}.items():  # fmt: skip
        grammar = grammar_of(WRITTEN_OUT[case], REWRITTEN)
        assert grammar is not None
        assert [value for value in values if not takes(grammar, value)] == [], WRITTEN_OUT[case]


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"const": 1}, "maxContains": 1},
        {"type": "string", "not": {"pattern": "^a"}},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
    ],
)
def test_what_has_no_form_is_not_written_out(schema: dict[str, Any]) -> None:
    assert grammar_of(schema, REWRITTEN) is None


# Schema, valid values, invalid values: keywords that no grammar holds, alone and inside of others.
WATCHED: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, [[], ["a"], ["a", "b", "ab"]],
     [["a", "a"], ["a", "b", "a"]]),
    ({"type": "array", "items": {"enum": ["bow", "boat", 3, 33, None]}, "uniqueItems": True},
     [["boat", "bow", 33, 3, None]], [["bow", "bow"], [3, 3]]),
    ({"type": "array", "uniqueItems": True, "maxItems": 6}, [[1, True, "1", [1], {"a": 1}, None]],
     [[1, 1.0], [{"a": 1, "b": 2}, {"b": 2, "a": 1}], [[], []]]),
    ({"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}},
     [{}, {"ab": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    ({"type": "string", "not": {"pattern": "^a"}}, ["", "ba"], ["a", "ab"]),
    ({"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}, "maxContains": 1},
     [[1], [2, 1]], [[], [1, 1]]),
    ({**PERSON, "dependentRequired": {"a": ["b"]}}, [{}, {"b": "x", "a": 1}, {"a": 1, "b": "x"}], [{"a": 1}]),
    ({**PERSON, "required": ["c", "a"]}, [{"a": 1, "c": True}], [{"a": 1}, {"d": 1, "a": 1, "c": True}]),
    ({**PERSON, "required": ["a"], "not": {"required": ["b"]}}, [{"a": 1}, {"c": True, "a": 1}],
     [{"a": 1, "b": "x"}, {"a": 1, "a2": 1}]),
    ({**PERSON, "oneOf": [{"required": ["a"]}, {"required": ["b"]}], "minProperties": 2},
     [{"a": 1, "c": True}, {"c": True, "b": "y"}], [{"a": 1}, {"b": "x", "a": 1}]),
    ({"oneOf": [{"type": "number", "multipleOf": 3}, {"type": "number", "multipleOf": 5}]}, [3, 10], [15, 7]),
    ({"type": "object", "properties": {"kind": {"enum": ["x", "y"]}, "n": {}},
      "if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]}, "then": {"required": ["n"]}, "not": {
          "propertyNames": {"maxLength": 1}, "minProperties": 1}},
     [{}, {"n": 1, "kind": "x"}, {"kind": "y"}], [{"kind": "x"}, {"n": 1}]),
    ({"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": {"type": "integer"}},
     [{"a": 1}, {"a": 1, "b": 2}], [{}, {"a": 1, "b": 2, "c": 3}]),
    ({"items": {"type": "array", "uniqueItems": True, "items": {"$ref": "#/$defs/n"}}, "type": "array",
      "$defs": {"n": {"type": "integer", "not": {"const": 5}}}}, [[[1, 2], [1]]], [[[1, 1]], [[5]]]),
    ({"type": "integer", "not": {"enum": [5, 55]}, "uniqueItems": True}, [4, 555, 56], [5, 55]),
    ({"type": "string", "format": "uri-reference"}, ["/a/b?c#d", "x:y", ""], ["a b", "#a#b"]),
    ({"type": "string", "format": "json-pointer"}, ["", "/a~0b/1"], ["a", "/~2"]),
    ({"type": "string", "format": "regex"}, ["^[a-z]+$", "a.*b"], ["(", "[", "*"]),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(WATCHED)))
def test_watched_schema_takes_what_is_valid_and_only_that(case: int) -> None:
    schema, valid, invalid = WATCHED[case]
    checker = jsonschema.Draft202012Validator(schema)
    if "format" not in schema:
        assert all(map(checker.is_valid, valid))
        assert not any(map(checker.is_valid, invalid))
    grammar = grammar_of(schema)
    assert grammar is not None
    assert [value for value in valid if not takes(grammar, value)] == []
    assert [value for value in invalid if takes(grammar, value)] == []
    rng = random.Random(SEED + case)
    texts = {text for _ in range(25) if (text := walk(grammar, rng)) is not None}
    assert all(checker.is_valid(json.loads(text)) for text in texts)
    assert texts


def test_no_name_is_begun_that_can_only_come_twice() -> None:
    inner = {
        "type": "object",
        "properties": {"on": {"type": "null"}, "only": {"type": "null"}},
        "required": ["only"],
    }
    closed_inner = {**inner, "additionalProperties": False}
    for schema in (closed_inner, {"type": "object", "properties": {"a": {"anyOf": [closed_inner, {"type": "null"}]}},
                                  "additionalProperties": False, "minProperties": 1}):  # fmt: skip
        watched = {**schema, "not": {"required": ["zzz"]}}
        grammar = grammar_of(watched)
        assert grammar is not None
        for seed in range(30):
            text = walk(grammar, random.Random(seed))
            assert text is not None, "no token was left"
            jsonschema.validate(json.loads(text), watched)


def test_watch_rolls_back_and_is_a_function_of_the_output() -> None:
    grammar = grammar_of({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True})
    assert grammar is not None

    def start(ids: list[int]) -> GrammarConstraint:
        watch = watch_grammar(LLTOKENIZER, grammar, VOCABULARY)
        return GrammarConstraint(compile_matcher(LLTOKENIZER, grammar), VOCAB, ids, watch, frozenset([EOS]))

    def allowed(constraint: GrammarConstraint) -> list[int]:
        mask = np.ones(VOCAB, np.bool_)
        constraint.mask(mask)
        return np.flatnonzero(mask).tolist()

    ids = list(b'["a","a')  # can only become the item that is there
    constraint = start([])
    for token_id in ids:
        constraint.advance(token_id)
    assert allowed(constraint) == allowed(start(ids)) == []
    constraint.rollback(1)
    assert allowed(constraint) == allowed(start(ids[:-1])) == list(b"b")
    assert allowed(start(list(b'["a","b"'))) == list(b"]")


def test_the_opposite_of_everything_and_of_nothing() -> None:
    assert negate(True, {}) is False
    assert negate(False, {}) == {}
    assert negate({"title": "any"}, {}) is False
    with pytest.raises(NoForm):
        negate({"$ref": "https://elsewhere"}, {})
    loop = {"$ref": "#"}
    with pytest.raises(NoForm):
        negate(loop, loop)
    assert written_out({"not": {}}, {}) is False


# Groups in which an invalid instance is allowed: annotations of the newer dialects, one character of ECMA's white
# space, and a rule of draft 7 on `$id` beside `$ref`.
KNOWN = {
    "validation of string-encoded content based on media type",
    "validation of binary string-encoding",
    "validation of binary-encoded media type documents",
    "ECMA 262 \\S matches everything but whitespace",
    "$ref prevents a sibling $id from changing the base uri",
}


def test_the_official_suite_lets_nothing_invalid_in(shared_data: Path) -> None:
    """JSON Schema Test Suite: for every schema that compiles, no invalid instance is accepted.

    Formats are left out: those of the compiler are patterns, which cannot know leap seconds or Punycode.
    """
    with gzip.open(shared_data / "conformance" / "json_schema_test_suite.json.gz", "rt") as file:
        suite = json.load(file)
    groups = [group for group in suite_groups(suite) if '"format"' not in json.dumps(group["schema"])]
    num_compiled = num_invalid = 0
    let_in = set()
    for group in groups:
        grammar = grammar_of(group["schema"])
        if grammar is None:
            continue
        num_compiled += 1
        for test in group["tests"]:
            if not test["valid"]:
                num_invalid += 1
                if takes(grammar, test["data"]):
                    let_in.add(group["description"])
    print(f"{num_compiled} of {len(groups)} schemas compile, {num_invalid} invalid instances")
    assert num_invalid > 500
    assert let_in <= KNOWN, let_in - KNOWN


def suite_groups(suite: Any) -> list[dict[str, Any]]:
    """Return every test group whose schema is an object, at any depth of the packed file."""
    found: list[dict[str, Any]] = []
    if isinstance(suite, list):
        for item in suite:
            found += suite_groups(item)
    elif isinstance(suite, dict) and {"schema", "tests"} <= set(suite):
        found += [suite] if isinstance(suite["schema"], dict) else []
    elif isinstance(suite, dict):
        for item in suite.values():
            found += suite_groups(item)
    return found


def test_mask_of_the_watch_is_that_of_trying_every_token() -> None:
    pieces = ['"a', 'a"', '","', '"]', '",', '"}', '":', '": "', 'b","', '"a"', '"b"', '1,', '2]', ', "', '],', '},',
              '"a":', 'a","b', '\\"', '[["', '"}]', ' ']  # fmt: skip
    table = TABLE._replace(tokens=[*TABLE.tokens, *(piece.encode() for piece in pieces)])
    tokenizer, vocabulary, size = ll_tokenizer(table), Vocabulary(table.tokens), len(table.tokens)
    rng = random.Random(SEED)
    for schema, *_ in WATCHED:
        grammar = grammar_of(schema)
        assert grammar is not None
        for _ in range(2):
            matcher, watch = (
                compile_matcher(tokenizer, grammar),
                watch_grammar(tokenizer, grammar, vocabulary),
            )
            if watch is None:
                continue
            constraint = GrammarConstraint(matcher, size, watch=watch, eos_ids=frozenset([EOS]))
            plain = GrammarConstraint(matcher, size)
            for _ in range(25):
                mask, allowed = np.ones(size, np.bool_), np.ones(size, np.bool_)
                constraint.mask(mask)
                plain.mask(allowed)
                for token_id in np.flatnonzero(allowed).tolist():
                    if token_id != EOS:
                        watch.advance(token_id)
                        allowed[token_id] = not watch.is_broken
                        watch.rollback(1)
                allowed[EOS] &= watch.ends()
                assert mask.tolist() == allowed.tolist(), f"seed {SEED}, {schema}"
                next_ids = [i for i in np.flatnonzero(mask).tolist() if i != EOS]
                likely = [i for i in next_ids if i > EOS or chr(i) in '"}],:a1'] or next_ids
                if not next_ids:
                    break
                constraint.advance(rng.choice(likely))
    print(f"seed {SEED}")


def test_no_value_is_begun_that_the_schema_lists_but_excludes() -> None:
    lists = {
        "x": {"enum": [[1], [2, 4], [5]]},
        "y": {"enum": [[1], [1, 2]]},
        "z": {"enum": [[1], [2, 4], [4, 6], [5]]},
    }
    schemas: list[dict[str, Any]] = [
        {"oneOf": list(lists.values()), "type": "array", "if": {"minItems": 1}, "then": {"items": {"maximum": 4}}},
        {"type": "object", "properties": {"a": {"enum": ["x", "xy"], "not": {"const": "x"}}}, "uniqueItems": True},
        {"enum": [{"a": 1, "b": 2}, {"a": 3}], "not": {"required": ["b"]}},
    ]  # fmt: skip
    for schema in schemas:
        grammar = grammar_of(schema)
        assert grammar is not None
        assert "\n" in grammar
        for seed in range(20):
            text = walk(grammar, random.Random(seed))
            assert text is not None, f"seed {seed}: no token was left, {schema}"
            jsonschema.validate(json.loads(text), schema)

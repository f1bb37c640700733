"""Grammars over every kind of vocabulary: they allow exactly the form; their state is a function of the output ids."""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.text.conftest import Load

from quire.errors import RequestError
from quire.models.checkpoint import read_tokenizer
from quire.models.hub import quill_path
from quire.structured_outputs import StructuredOutputsParams
from quire.text.grammar import MAX_SOURCE_BYTES, build_grammar, grammar_source
from quire.text.grammar_matcher import (
    GrammarConstraint,
    compile_matcher,
    encode_forced,
    first_error,
    ll_tokenizer,
)
from quire.text.token_table import token_table
from quire.text.tokenizer import Tokenizer

SEED = 20261121
EXTRA = 37  # padding of a model's logits beyond its vocabulary
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "größe": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": ["a/b", "日本", "c d"]}, "maxItems": 3},
        "sub": {"type": ["object", "null"], "properties": {"x": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["name", "größe", "tags", "sub"],
    "additionalProperties": False,
}  # fmt: skip
VOCABULARIES = [
    "gpt2", "tiktoken/cl100k_base.tiktoken", "llama3", "qwen2", "gpt-neox", "phi-2",  # byte-level
    "llama2", "llama2/tokenizer.model", "phi-3-mini", "mistral/tokenizer.model.v1",  # sentencepiece
    "ggml_vocab/ggml-vocab-llama-spm.gguf", "ggml_vocab/ggml-vocab-gpt-2.gguf", "quill",
]  # fmt: skip


class Vocabulary:
    """A tokenizer, one of its EOS ids, and llguidance's form of both."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos = (
            tokenizer.eos_token_ids or tuple(tokenizer.special_token_ids) or (tokenizer.vocab_size - 1,)
        )[0]
        self.size = tokenizer.vocab_size + EXTRA
        self.table = token_table(tokenizer, self.size, (self.eos, self.size + 5))
        self.ll = ll_tokenizer(self.table, encode_forced(tokenizer))

    def start(self, params: StructuredOutputsParams) -> GrammarConstraint:
        matcher = compile_matcher(self.ll, build_grammar(grammar_source(params)))
        assert not matcher.is_error(), matcher.get_error()
        return GrammarConstraint(matcher, self.size)

    def allowed(self, constraint: GrammarConstraint) -> list[int]:
        mask = np.ones(self.size, np.bool_)
        assert constraint.mask(mask) is True
        return np.flatnonzero(mask).tolist()

    def walk(self, constraint: GrammarConstraint, rng: random.Random, limit: int = 3000) -> list[int]:
        """Sample allowed ids at random, with a preference for short tokens, until EOS."""
        ids: list[int] = []
        while len(ids) < limit:
            token_id = rng.choice(self.allowed(constraint))
            if token_id == self.eos:
                return ids
            constraint.advance(token_id)
            ids.append(token_id)
        raise AssertionError(f"no end after {limit} tokens")

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, continues=True)


@lru_cache(maxsize=1)
def vocabulary_at(path: Path) -> Vocabulary:
    return Vocabulary(read_tokenizer(path))


@pytest.fixture(scope="module")
def quill() -> Vocabulary:
    return Vocabulary(read_tokenizer(quill_path("quill")))


def fits(value: Any) -> bool:
    sub = value["sub"]
    return (
        set(value) == set(SCHEMA["properties"])  # type: ignore[call-overload]
        and len(value["name"]) <= 12
        and isinstance(value["größe"], int | float)
        and len(value["tags"]) <= 3
        and set(value["tags"]) <= {"a/b", "日本", "c d"}
        and (sub is None or set(sub) <= {"x"})
    )


@pytest.mark.parametrize("name", VOCABULARIES)
def test_every_kind_of_vocabulary(load: Load, tokenizers_folder: Path, name: str) -> None:
    vocabulary = vocabulary_at(quill_path("quill") if name == "quill" else tokenizers_folder / name)
    for seed in range(3 if vocabulary.tokenizer.vocab_size < 50_000 else 1):
        start = vocabulary.start(StructuredOutputsParams(json=SCHEMA))
        ids = vocabulary.walk(start, random.Random(SEED + seed))
        assert fits(json.loads(vocabulary.text(ids))), (name, seed, vocabulary.text(ids))
    choice = vocabulary.start(StructuredOutputsParams(choice=['ünïcode\n"q" / \\x', "naïve"]))
    text = vocabulary.text(vocabulary.walk(choice, random.Random(SEED)))
    assert text in ('ünïcode\n"q" / \\x', "naïve")
    takes_what_the_model_would_write(vocabulary, name)


def takes_what_the_model_would_write(vocabulary: Vocabulary, name: str) -> None:
    text = '{"name": "Ünal 7", "größe": -1.5e3, "tags": ["日本", "a/b"],\n  "sub": {"x": true}}'
    constraint = vocabulary.start(StructuredOutputsParams(json=SCHEMA))
    for token_id in encode_forced(vocabulary.tokenizer)(text):
        constraint.advance(token_id)
        assert constraint.error is None, (name, vocabulary.tokenizer.token_bytes(token_id))
    assert vocabulary.allowed(constraint) == [vocabulary.eos]


def test_special_tokens_are_never_text(quill: Vocabulary) -> None:
    constraint = quill.start(StructuredOutputsParams(regex="(.|\n)*"))
    allowed = set(quill.allowed(constraint))
    assert quill.eos in allowed
    assert not allowed & (set(quill.table.special_ids) - {quill.eos})
    assert max(allowed) < quill.tokenizer.vocab_size


GBNF = 'root ::= ("ab" | [0-9]{2} num*)\nnum ::= "-" [a-c]+ # comment'
ONES = {"type": "array", "items": {"const": 1}}
KINDS: list[tuple[StructuredOutputsParams, str]] = [
    (StructuredOutputsParams(regex=r"[A-Z]/\d{2}\n?"), r"[A-Z]/\d{2}\n?"),
    (StructuredOutputsParams(regex="a/b|a\nb"), "a/b|a\nb"),
    (StructuredOutputsParams(choice=("yes", "no", "")), "yes|no|"),
    (StructuredOutputsParams(choice=("a\x7f\x00", "\x1b\x85")), "a\x7f\x00|\x1b\x85"),
    (StructuredOutputsParams(grammar='start: "a" n?\nn: /[0-9]+/ "."'), r"a([0-9]+\.)?"),
    (StructuredOutputsParams(grammar=GBNF), "ab|[0-9]{2}(-[a-c]+)*"),
    (StructuredOutputsParams(json={"type": "integer", "minimum": 3, "maximum": 12}), "[3-9]|1[0-2]"),
    (StructuredOutputsParams(json='{"const": "x y"}'), '"x y"'),
    (StructuredOutputsParams(json=ONES, disable_any_whitespace=True), r"\[(1(,1)*)?\]"),
    (StructuredOutputsParams(json=ONES, whitespace_pattern=" {2}"),
     r"\[( {2})?(1( {2})?(,( {2})?1( {2})?)*)?\]"),
    (StructuredOutputsParams(json=ONES), r"\[\s*(1\s*(,\s*1\s*)*)?\]"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(KINDS)))
def test_every_kind_of_grammar(quill: Vocabulary, case: int) -> None:
    params, expected = KINDS[case]
    for seed in range(20):
        text = quill.text(quill.walk(quill.start(params), random.Random(SEED + seed)))
        assert re.fullmatch(expected, text), (params, seed, text)


def test_closed_objects(quill: Vocabulary) -> None:
    schema = {
        "properties": {"properties": {"properties": {"a": {"type": "null"}}, "type": "object"}},
        "type": "object",
    }
    params = StructuredOutputsParams(json=schema, disable_additional_properties=True)
    for seed in range(10):
        value = json.loads(quill.text(quill.walk(quill.start(params), random.Random(SEED + seed))))
        assert set(value) <= {"properties"}
        assert set(value.get("properties", ())) <= {"a"}


TAG = {"begin": "<f=a>", "schema": {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"],
                                    "additionalProperties": False}, "end": "</f>"}  # fmt: skip
FREE_TAG = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}
TAGS: list[tuple[Any, str, bool]] = [
    ({"structures": [TAG], "triggers": ["<f="]}, 'free <f=a>{"k":1}</f> text', True),
    ({"structures": [TAG], "triggers": ["<f="]}, "free text alone", True),
    ({"structures": [TAG], "triggers": ["<f="]}, "free <f=b>", False),
    ({"structures": [TAG], "triggers": ["<f="]}, 'free <f=a>{"k":2', False),
    ({"format": {"type": "sequence", "elements": [
        {"type": "const_string", "value": "A:"}, {"type": "regex", "pattern": "[0-9]/x"},
        {"type": "or", "elements": [
            {"type": "const_string", "value": "!"}, {"type": "json_schema", "json_schema": True}]},
    ]}}, 'A:7/x{"any": []}', True),
    ({"format": FREE_TAG}, "<t>a</b>c</t>", True),
    ({"format": FREE_TAG}, "<t>a</t>b", False),
    ({"format": {"type": "tags_with_separator", "separator": ",", "at_least_one": True, "tags": [
        {"begin": "(", "content": {"type": "grammar", "grammar": 'start: "x"+'}, "end": ")"}]}}, "(x),(xx)", True),
    ({"format": {"type": "triggered_tags", "triggers": ["<"], "at_least_one": True, "stop_after_first": True, "tags": [
        {"begin": "<b>", "content": {"type": "const_string", "value": "1"}, "end": "</b>"}]}}, "ab<b>1</b>", True),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(TAGS)))
def test_structural_tags(quill: Vocabulary, case: int) -> None:
    spec, text, accepted = TAGS[case]
    constraint = quill.start(StructuredOutputsParams(structural_tag={"type": "structural_tag", **spec}))
    for token_id in quill.ll.greedy_tokenize(text):
        constraint.advance(token_id)
    ends = constraint.error is None and quill.eos in quill.allowed(constraint)
    assert ends == accepted


BAD: list[tuple[StructuredOutputsParams, str]] = [
    (StructuredOutputsParams(json='{"type":'), "no JSON"),
    (StructuredOutputsParams(json="[1]"), "must be an object"),
    (StructuredOutputsParams(grammar='root ::= "a'), "cannot be read"),
    (StructuredOutputsParams(structural_tag={"format": {"type": "tagg"}}), "did you mean 'tag'"),
    (
        StructuredOutputsParams(structural_tag={"structures": [TAG], "triggers": ["<g"]}),
        "none of the triggers",
    ),
    (StructuredOutputsParams(structural_tag={"structures": [], "triggers": ["<g"]}), "at least one object"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_what_is_no_grammar_says_why(case: int) -> None:
    params, said = BAD[case]
    with pytest.raises(RequestError, match=said):
        build_grammar(grammar_source(params))


def test_too_large_a_source() -> None:
    with pytest.raises(RequestError, match=str(MAX_SOURCE_BYTES)):
        grammar_source(StructuredOutputsParams(regex="a" * MAX_SOURCE_BYTES))
    deep: Any = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="too deeply"):
        grammar_source(StructuredOutputsParams(json=deep))


def test_a_schema_cannot_turn_the_compilers_checks_off(quill: Vocabulary) -> None:
    schema = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    grammar = build_grammar(grammar_source(StructuredOutputsParams(json=schema)))
    assert "uniqueItems" in first_error(compile_matcher(quill.ll, grammar))


def test_state_is_a_function_of_the_output(quill: Vocabulary) -> None:
    """Advanced, rolled back or rebuilt: the same masks at every position of an answer."""
    rng = random.Random(SEED)
    params = StructuredOutputsParams(json=SCHEMA)
    for _ in range(5):
        lived = quill.start(params)
        kept: list[int] = []
        while len(kept) < 40:
            drafts = []
            for _ in range(rng.randint(1, 4)):
                token_id = rng.choice(quill.allowed(lived))
                if token_id == quill.eos:
                    break
                lived.advance(token_id)
                drafts.append(token_id)
            accepted = rng.randint(0, len(drafts))
            lived.rollback(len(drafts) - accepted)
            kept += drafts[:accepted]
            fresh = compile_matcher(quill.ll, build_grammar(grammar_source(params)))
            rebuilt = GrammarConstraint(fresh, quill.size, kept)
            assert quill.allowed(rebuilt) == quill.allowed(lived), f"seed {SEED}: {quill.text(kept)!r}"
            if quill.allowed(lived) == [quill.eos]:
                break

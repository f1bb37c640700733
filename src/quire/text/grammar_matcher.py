"""The only module that calls llguidance: compiled grammars, and `GrammarConstraint`, a grammar as a `TokenConstraint`.

llguidance is imported with the first grammar, so `quire.LLM` works without it. Grammars are compiled under the same
limits in the helper process, in the engine and in tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import RequestError
from quire.text.constraint import BoolMask
from quire.text.json_watch import JsonWatch, Vocabulary
from quire.text.schema_check import SchemaCheck
from quire.text.schema_negation import NoForm
from quire.text.token_table import TokenTable
from quire.text.tokenizer import Tokenizer

TOO_COMPLEX = "the grammar became too complex to follow at this point of the answer"


def first_error(matcher: Any) -> str:
    """Return what is wrong with a grammar, or an empty string. Computes the first mask, on a copy of the matcher."""
    if matcher.is_error():
        return str(matcher.get_error())
    trial = matcher.deep_copy()
    if not any(trial.compute_bitmask()):
        return "no token of the model's vocabulary can begin such an answer"
    return str(trial.get_error())


def bitmask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words in a mask over ``vocab_size`` ids."""
    return -(-vocab_size // 32)


class GrammarConstraint:
    """One sequence's position in a grammar. EOS ids are allowed exactly where the grammar is complete."""

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        output_token_ids: Sequence[int] = (),
        watch: JsonWatch | None = None,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Take over ``matcher`` and ``watch``, at their start, and advance them over ``output_token_ids``."""
        self.matcher = matcher
        self.watch = watch
        self._eos_ids = eos_ids
        self._bits = np.zeros(bitmask_words(vocab_size), np.int32)
        self._vocab_size = vocab_size
        if output_token_ids:
            matcher.consume_tokens(list(output_token_ids))
            if watch is not None:
                watch.take(output_token_ids)

    @property
    def error(self) -> str | None:
        """Why the sequence cannot go on: a limit of llguidance, or a token that the grammar does not allow."""
        if not self.matcher.is_error():
            return None
        reason = self.matcher.stop_reason()
        if reason in ("ParserTooComplex", "LexerTooComplex"):
            return f"{TOO_COMPLEX} ({reason})"
        return f"{TOO_COMPLEX}: {self.matcher.get_error()}"

    def mask(self, allowed: BoolMask) -> bool:
        """As `TokenConstraint.mask`; nothing is allowed after an error."""
        self.matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        here = unpack(self._bits[None], self._vocab_size)[0]
        self.check(self._bits, here)
        allowed &= here if self.error is None else False
        return True

    def check(self, bits: NDArray[np.int32], allowed: NDArray[np.bool_]) -> None:
        """Clear what the watch forbids in a mask of the grammar, given as words and as flags."""
        if self.watch is not None:
            self.watch.forbid(bits, allowed, self._eos_ids)

    def advance(self, token_id: int) -> None:
        self.matcher.consume_token(token_id)
        if self.watch is not None:
            self.watch.advance(token_id)

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self.matcher.rollback(num_tokens)
            if self.watch is not None:
                self.watch.rollback(num_tokens)


def unpack(bits: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Return ``bits: [rows, words]`` as bool ``[rows, vocab_size]``."""
    rows = np.unpackbits(bits.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return rows.view(np.bool_)


# llguidance counts work, not time, so these limits act at the same place on every machine. By its own figures they
# allow 20 ms of building regexes, then 14 ms per mask.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 250_000,
    "max_grammar_size": 500_000,
}


def compile_matcher(tokenizer: Any, grammar: str) -> Any:
    """Return an `LLMatcher` before its first token. Never raises: `first_error` returns what is wrong.

    ``tokenizer``: from `ll_tokenizer`.
    """
    from llguidance import LLMatcher, LLParserLimits

    # A second line is for `watch_grammar`.
    limits = LLParserLimits(**LIMITS, verbose_errors=False)
    return LLMatcher(tokenizer, grammar.partition("\n")[0], log_level=0, limits=limits)


def watch_grammar(tokenizer: Any, grammar: str, vocabulary: Vocabulary) -> JsonWatch | None:
    """Return the watch that a grammar needs, at its start; None if it needs none."""
    schema = grammar.partition("\n")[2]
    return JsonWatch(SchemaCheck(json.loads(schema), _Patterns(tokenizer)), vocabulary) if schema else None


def accepts(tokenizer: Any, grammar: str, vocabulary: Vocabulary, token_ids: Sequence[int]) -> bool:
    """Return whether these tokens are a whole answer of the grammar."""
    matcher, watch = compile_matcher(tokenizer, grammar), watch_grammar(tokenizer, grammar, vocabulary)
    if matcher.try_consume_tokens(list(token_ids)) < len(token_ids) or not matcher.is_accepting():
        return False
    if watch is not None:
        watch.take(token_ids)
    return watch is None or watch.ends()


class _Patterns:
    """Matches patterns and formats as the grammars do: in time linear in the text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._matchers: dict[tuple[str, str], Any] = {}

    def __call__(self, keyword: str, value: str, text: str) -> bool:
        matcher = self._matchers.get((keyword, value))
        if matcher is None:
            schema = {"type": "string", keyword: value, "x-guidance": {"whitespace_flexible": False}}
            grammar = json.dumps({"grammars": [{"json_schema": schema}]})
            matcher = self._matchers[keyword, value] = compile_matcher(self._tokenizer, grammar)
            if matcher.is_error():
                raise NoForm
        ids = self._tokenizer.greedy_tokenize(json.dumps(text, ensure_ascii=False))
        trial = matcher.deep_copy()
        return bool(trial.try_consume_tokens(ids) == len(ids) and trial.is_accepting())


def ll_tokenizer(table: TokenTable, encode: Encode | None = None) -> Any:
    """Return llguidance's form of ``table``, with a trie over the tokens (takes a second for 128k of them).

    ``encode`` returns the ids of a text that the grammar forces, in the tokens that the model would choose. Without it
    the longest tokens are used.
    """
    from llguidance import LLTokenizer

    wrapper: Any = _Wrapper(table, encode)
    made = LLTokenizer(wrapper, eos_token=list(table.eos_ids))
    wrapper.greedy = made.greedy_tokenize
    return made


def mask_threads(num_threads: int) -> Any:
    """Return an `LLExecutor`, which advances matchers and computes masks on ``num_threads`` threads without the GIL."""
    from llguidance import LLExecutor

    return LLExecutor(num_threads)


def as_lark(text: str) -> str:
    """Return a Lark grammar unchanged, and GBNF or EBNF (rules with ``::=``) as Lark.

    Raises:
        RequestError: ``text`` is none of these.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as error:
        # The parser has its own exceptions, and raises IndexError at the end of the text.
        raise RequestError(f"the grammar cannot be read: {error}") from None


class _Wrapper:
    """The object that `LLTokenizer` reads, with the names that it expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable, encode: Encode | None) -> None:
        self.tokens = list(table.tokens)
        self.special_token_ids = list(table.special_ids)
        self.eos_token_id = table.eos_ids[0]
        self.greedy: Encode | None = None
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        spelled = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
        if self._encode is not None:
            ids = self._encode(spelled)
            if b"".join([self.tokens[i] for i in ids]) == spelled.encode():
                return ids
        # The tokenizer normalizes the text, or there is none here.
        return [] if self.greedy is None else self.greedy(spelled)


Encode = Callable[[str], list[int]]


def encode_forced(tokenizer: Tokenizer) -> Encode:
    """Return the encoder for a piece in the middle of a text: no BOS, no special tokens, no leading space."""
    mark = "\n" if tokenizer.text_rule.drops_leading_space else ""

    def encode(text: str) -> list[int]:
        ids = tokenizer.encode(mark + text, add_special_tokens=False, allow_special=False)
        if mark:
            head = b""
            while ids and not head.endswith(b"\n"):
                head += tokenizer.token_bytes(ids.pop(0))
        return ids

    return encode

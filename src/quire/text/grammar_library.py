"""The one door to llguidance, which is imported when the first grammar comes: `quire.LLM` works without it.

What is compiled here has the same limits in the helper process, in the engine and in tests.
"""

from __future__ import annotations

from typing import Any

from quire.errors import RequestError
from quire.text.grammar_tokens import Encode, TokenTable

# llguidance counts its work, so these cut at the same place on every machine. In time, by its own figures: 20 ms of
# building regexes, then 14 ms a mask at most.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 250_000,
    "max_grammar_size": 500_000,
}


def compile_matcher(tokenizer: Any, grammar: str) -> Any:
    """Return an `LLMatcher` before its first token. It never raises: `first_error` tells what is wrong.

    ``tokenizer`` is that of `ll_tokenizer`.
    """
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS, verbose_errors=False))


def ll_tokenizer(table: TokenTable, encode: Encode | None = None) -> Any:
    """Return llguidance's own form of ``table``, with a trie over the tokens (a second for 128k of them).

    ``encode`` finds the ids of a text that the grammar forces, so that it is written in the tokens that the model
    knows; without it the longest tokens are taken.
    """
    from llguidance import LLTokenizer

    wrapper: Any = _Wrapper(table, encode)
    made = LLTokenizer(wrapper, eos_token=list(table.eos_ids))
    wrapper.greedy = made.greedy_tokenize
    return made


def mask_threads(num_threads: int) -> Any:
    """Return the `LLExecutor` that advances matchers and computes masks on ``num_threads`` threads, without the GIL."""
    from llguidance import LLExecutor

    return LLExecutor(num_threads)


def as_lark(text: str) -> str:
    """Return Lark as it is, and GBNF or EBNF (rules with ``::=``) as Lark.

    Raises:
        RequestError: it is neither.
    """
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except (
        Exception
    ) as error:  # its parser has exceptions of its own, and raises IndexError at the end of the text
        raise RequestError(f"the grammar cannot be read: {error}") from None


class _Wrapper:
    """What `LLTokenizer` reads; the names are its own."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable, encode: Encode | None) -> None:
        self.tokens = list(table.tokens)
        self.special_token_ids = list(table.special_ids)
        self.eos_token_id = table.eos_ids[0]
        self.greedy: Encode | None = None
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        said = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
        if self._encode is not None:
            ids = self._encode(said)
            if b"".join([self.tokens[i] for i in ids]) == said.encode():
                return ids
        # Normalised on the way, or no tokenizer here.
        return [] if self.greedy is None else self.greedy(said)

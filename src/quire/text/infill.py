"""Filling in the middle: the prompt that asks a model for the text between a prefix and a suffix.

Models that were trained for it (Bavarian et al. 2022, arXiv:2207.14255) have tokens of their own for it, by which
`find_infill` knows them. Model cards name the order of the two parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.text.tokenizer import Tokenizer

# Before the prefix, before the suffix, before the answer; whether the suffix comes first.
_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", False),  # Qwen2.5-Coder, CodeGemma, Granite 4
    (
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        False,
    ),  # StarCoder, StarCoder2, Granite Code, StableCode
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", False),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", False),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>", False),  # CodeLlama
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", True),  # Seed-Coder
    ("[PREFIX]", "[SUFFIX]", "", True),  # Codestral and other models of Mistral
)
# Tokens that end such an answer beside the model's EOS: another file begins, or nothing is left to fill in.
_ENDS = (
    "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<file_sep>", "<repo_name>",
    "<fim_pad>", "▁<EOT>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Infill:
    """The tokens of one model for filling in the middle."""

    prefix: int
    suffix: int
    middle: tuple[int, ...]  # one id, or none where the prefix comes last
    suffix_first: bool
    end_ids: tuple[int, ...]

    def prompt(self, tokenizer: Tokenizer, prefix_ids: Sequence[int], suffix_ids: Sequence[int]) -> list[int]:
        """Return the ids of the prompt: BOS if the model expects one, then both parts behind their tokens."""
        begin = [token_id for token_id in tokenizer.encode("") if token_id == tokenizer.bos_token_id]
        before, behind = [self.prefix, *prefix_ids], [self.suffix, *suffix_ids]
        parts = (*behind, *before) if self.suffix_first else (*before, *behind)
        return [*begin, *parts, *self.middle]


def find_infill(tokenizer: Tokenizer) -> Infill | None:
    """Return how the model fills in the middle; None if its vocabulary has no tokens for it."""
    for *marks, suffix_first in _FORMS:
        ids = [tokenizer.token_to_id(mark) for mark in marks if mark]
        if None not in ids:
            prefix, suffix, *middle = [token_id for token_id in ids if token_id is not None]
            ends = [tokenizer.token_to_id(end) for end in _ENDS]
            end_ids = tuple([token_id for token_id in ends if token_id is not None])
            return Infill(prefix, suffix, tuple(middle), bool(suffix_first), end_ids)
    return None


def infill_lead(tokenizer: Tokenizer) -> str:
    """Return the text to encode a suffix behind, and to take off: it keeps off sentencepiece's space before a text.

    CodeLlama's authors do so with the same character.
    """
    return "☺" if tokenizer.text_rule.drops_leading_space else ""

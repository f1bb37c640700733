"""Filling in the middle: which vocabulary has which form, and the ids that each form makes."""

from __future__ import annotations

import pytest
from tests.api.fake_frontend import byte_tokenizer
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from quire.text.infill import find_infill, infill_lead
from quire.text.token_text import make_token_text
from quire.text.tokenizer import SpecialTokens, Tokenizer

FORMS = [
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "{0}ab{1}cd{2}"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "{0}ab{1}cd{2}"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "{0}ab{1}cd{2}"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "{0}ab{1}cd{2}"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "{0}ab{1}cd{2}"),
    ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", "{1}cd{0}ab{2}"),
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]", "{1}cd{0}ab"),
]


def with_tokens(*texts: str, bos: bool = False) -> Tokenizer:
    backend = byte_tokenizer()._backend
    backend.add_special_tokens([AddedToken(text, special=True) for text in texts])
    roles = {"eos_token": "<|end|>", **({"bos_token": texts[0]} if bos else {})}
    return Tokenizer(backend, make_token_text(backend), SpecialTokens(roles))


@pytest.mark.parametrize(("prefix", "suffix", "middle", "written"), FORMS)
def test_each_family_has_its_form(prefix: str, suffix: str, middle: str, written: str) -> None:
    tokenizer = with_tokens(prefix, suffix, middle)
    infill = find_infill(tokenizer)
    assert infill is not None
    ids = infill.prompt(tokenizer, tokenizer.encode("ab"), tokenizer.encode("cd"))
    assert tokenizer.decode(ids, skip_special_tokens=False) == written.format(prefix, suffix, middle)


def test_a_vocabulary_without_all_marks_has_none() -> None:
    assert find_infill(byte_tokenizer()) is None
    assert find_infill(with_tokens("<|fim_prefix|>", "<|fim_suffix|>")) is None


def test_ends_of_a_file_end_the_answer() -> None:
    tokenizer = with_tokens(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|fim_pad|>"
    )
    infill = find_infill(tokenizer)
    assert infill is not None
    assert {tokenizer.id_to_token(token_id) for token_id in infill.end_ids} == {"<|file_sep|>", "<|fim_pad|>"}


def test_sentencepiece_puts_no_space_before_a_suffix() -> None:
    vocab = {
        text: i for i, text in enumerate(["<unk>", "▁", "a", "b", "▁a", "☺", "▁<PRE>", "▁<SUF>", "▁<MID>"])
    }
    backend = Backend(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend, make_token_text(backend), SpecialTokens())
    lead = infill_lead(tokenizer)
    assert lead
    ids = tokenizer.encode(lead + "ab")[len(tokenizer.encode(lead)) :]
    assert [tokenizer.id_to_token(i) for i in ids] == ["a", "b"]
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("ab")] == ["▁a", "b"]

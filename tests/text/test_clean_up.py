"""The clean-up of spaces: as a stream it equals the whole, and only non-BPE vocabularies get it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from tokenizers.models import Unigram

from quire.text.load import load_tokenizer
from quire.text.token_text import CleanUpStream, clean_up
from quire.text.tokenizer import IncrementalDetokenizer

PARTS = st.sampled_from(
    [" ", ".", "?", "!", ",", "'", "n", "t", "m", "s", "v", "e", "r", "a", " '", " n't", " ' "]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.lists(PARTS, max_size=6).map("".join), max_size=8))
def test_a_stream_equals_the_whole(pieces: list[str]) -> None:
    stream = CleanUpStream()
    whole = clean_up("".join(pieces))
    text = ""
    for piece in pieces:
        text += stream.feed(piece)
        assert whole.startswith(text)
    assert text + stream.finish() == whole


def test_the_chain() -> None:
    assert clean_up("do n't stop , it 's me !") == "don't stop, it's me!"
    stream = CleanUpStream()
    assert stream.feed("hello world") == "hello world", "nothing is held back without need"


def test_clean_up_needs_the_flag_and_no_bpe_vocabulary(tokenizers_folder: Path, tmp_path: Path) -> None:
    asks = json.dumps({"clean_up_tokenization_spaces": True})
    unigram = tmp_path / "unigram"
    unigram.mkdir()
    backend = Backend(
        Unigram([("<unk>", 0.0), ("▁so", -1.0), ("▁,", -1.0), ("▁", -2.0)], unk_id=0, byte_fallback=False)
    )
    backend.decoder = decoders.Metaspace()
    backend.save(str(unigram / "tokenizer.json"))
    assert load_tokenizer(unigram).decode([1, 2, 1]) == "so , so"
    (unigram / "tokenizer_config.json").write_text(asks)
    tokenizer = load_tokenizer(unigram)
    assert tokenizer.decode([1, 2, 1]) == "so, so"
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.feed(1), detokenizer.feed(3), detokenizer.feed(2), detokenizer.finish()] == [
        "so",
        "",
        " ,",
        "",
    ]
    assert tokenizer.decode([1, 3, 2]) == "so ,"
    bpe = tmp_path / "bpe"
    bpe.mkdir()
    shutil.copy(tokenizers_folder / "phi-2" / "tokenizer.json", bpe)
    (bpe / "tokenizer_config.json").write_text(asks)
    tokenizer = load_tokenizer(bpe)
    assert tokenizer.decode(tokenizer.encode("so , so")) == "so , so"

"""sentencepiece files: our protobuf reader, and unigram models (written here, checked against `tokenizers` itself)."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from tests.text.conftest import Load
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import Unigram

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.text.load import load_tokenizer
from quire.text.sentencepiece import read_sentencepiece

pytestmark = pytest.mark.component


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, data: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(data)) + data


def model_file(pieces: list[tuple[str, float, int]], model_type: int = 1, **normalizer: bool) -> bytes:
    fields = {"add_dummy_prefix": 3, "remove_extra_whitespaces": 4, "escape_whitespaces": 5}
    data = b"".join(
        message(
            1, message(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score) + number(3, kind)
        )
        for text, score, kind in pieces
    )
    trainer = number(3, model_type) + number(40, 0) + number(41, -1) + number(42, 1) + number(43, -1)
    normalizer = {"add_dummy_prefix": True, **normalizer}
    rules = b"".join(number(fields[name], int(value)) for name, value in normalizer.items())
    return data + message(2, trainer) + message(3, rules)


@pytest.fixture(scope="module")
def trained(shared_data: Path) -> list[tuple[str, float]]:
    """A unigram vocabulary of 600 pieces from the first 60 kB of Shakespeare."""
    backend = Backend(Unigram())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    text = (shared_data / "text" / "tinyshakespeare.txt").read_text()[:60_000]
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(text.splitlines(), trainer)
    vocab = backend.get_vocab()
    model = backend.model.__getstate__()
    assert len(vocab) > 300
    return [(piece, score) for piece, score in json.loads(model)["vocab"]]


def test_a_unigram_model(trained: list[tuple[str, float]], shared_data: Path, tmp_path: Path) -> None:
    kinds = {"<unk>": 2, "</s>": 3}
    pieces = [(text, score, kinds.get(text, 1)) for text, score in trained]
    (tmp_path / "tokenizer.model").write_bytes(
        model_file(pieces, add_dummy_prefix=True, remove_extra_whitespaces=True)
    )
    tokenizer = load_tokenizer(tmp_path)
    oracle = Backend(Unigram(trained, unk_id=0, byte_fallback=False))
    oracle.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    oracle.decoder = decoders.Metaspace()
    text = (shared_data / "text" / "tinyshakespeare.txt").read_text()[100_000:104_000]
    lines = [line for line in text.splitlines() if line]
    for line in lines:
        ids = tokenizer.encode(line, add_special_tokens=False)
        assert [tokenizer.id_to_token(i) for i in ids] == [
            oracle.id_to_token(i) for i in oracle.encode(" ".join(line.split())).ids
        ]
        assert tokenizer.decode(ids) == " ".join(line.split())
    assert tokenizer.encode("  two   words ")[-1] == 1  # EOS
    assert tokenizer.encode("  two   words ") == tokenizer.encode("two words")
    assert tokenizer.bos_token_id is None


def test_numbers_of_the_reader(load: Load, tokenizers_folder: Path) -> None:
    model = read_sentencepiece(tokenizers_folder / "llama2" / "tokenizer.model")
    assert not model.is_unigram
    assert model.add_dummy_prefix
    assert not model.remove_extra_whitespaces
    assert (model.unk_id, model.bos_id, model.eos_id, model.pad_id) == (0, 1, 2, -1)
    assert model.pieces[259].text == "▁▁"
    assert len(model.pieces) == 32000


def test_kinds_that_are_not_supported(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0, 2), ("▁a", -1.0, 1)]
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model_file(pieces, model_type=3))
    with pytest.raises(UnsupportedModelError, match="word or char"):
        load_tokenizer(path)
    path.write_bytes(model_file(pieces, escape_whitespaces=False))
    with pytest.raises(UnsupportedModelError, match="escape_whitespaces"):
        load_tokenizer(path)
    path.write_bytes(model_file([]))
    with pytest.raises(ModelLoadError, match="no pieces"):
        load_tokenizer(path)


def test_user_defined_pieces_are_always_one_token(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0, 2), ("</s>", 0.0, 3), ("<br>", 0.0, 4)]
    pieces += [(char, -5.0 - i, 1) for i, char in enumerate("▁abr<>")]
    (tmp_path / "tokenizer.model").write_bytes(model_file(pieces, model_type=2, add_dummy_prefix=False))
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("a<br>b")] == ["a", "<br>", "b"]
    assert tokenizer.decode(tokenizer.encode("a<br>b")) == "a<br>b"
    assert 2 not in tokenizer.special_token_ids


def test_spaces_after_special_tokens_follow_the_legacy_flag(tokenizers_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(
        (tokenizers_folder / "llama2" / "tokenizer.model").read_bytes()
    )
    legacy = load_tokenizer(tmp_path)
    assert legacy.id_to_token(legacy.encode("</s>hello", False)[1]) == "▁hello"
    (tmp_path / "tokenizer_config.json").write_text('{"legacy": false}')
    modern = load_tokenizer(tmp_path)
    assert modern.id_to_token(modern.encode("</s>hello", False)[1]) == "hello"
    assert modern.encode("hello", False) == legacy.encode("hello", False)

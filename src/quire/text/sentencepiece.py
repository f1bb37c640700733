"""Vocabularies of scored pieces: sentencepiece's `tokenizer.model`, read here, and their copies in GGUF files.

The fields are those of `sentencepiece_model.proto` (google/sentencepiece): ModelProto {1: pieces, 2: trainer_spec,
3: normalizer_spec}.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.text.byte_level import add_bos_eos, add_tokens, merges_by_rank
from quire.text.folder_config import FolderConfig
from quire.text.token_text import make_token_text
from quire.text.tokenizer import SpecialTokens, Tokenizer

_UNIGRAM, _BPE = 1, 2
_Value = int | bytes


def load_sentencepiece(path: Path, config: FolderConfig) -> Tokenizer:
    """Build the tokenizer of a sentencepiece file; ``config`` may add tokens, roles and chat templates.

    By default a BPE model adds BOS (Llama, Mistral, Gemma) and a unigram model adds EOS (T5).
    """
    model = read_sentencepiece(path)
    if config.add_prefix_space is not None:
        model = replace(model, add_dummy_prefix=config.add_prefix_space)
    backend = pieces_backend(model, space_after_special=config.space_after_special)
    add_tokens(backend, config.added_tokens)
    own = {
        "unk_token": model.unk_id,
        "bos_token": model.bos_id,
        "eos_token": model.eos_id,
        "pad_token": model.pad_id,
    }
    roles = {role: text for role, i in own.items() if (text := model.text_of(i)) is not None}
    roles.update(config.special.roles)
    add_bos = not model.is_unigram if config.add_bos is None else config.add_bos
    add_eos = model.is_unigram if config.add_eos is None else config.add_eos
    add_bos_eos(
        backend, roles.get("bos_token") if add_bos else None, roles.get("eos_token") if add_eos else None
    )
    special = SpecialTokens(roles=roles, additional=config.special.additional)
    rule = make_token_text(backend, clean_up=config.clean_up_spaces and model.is_unigram)
    return Tokenizer(backend, rule, special, config.chat_templates)


def read_sentencepiece(path: Path) -> PieceModel:
    """Read a sentencepiece model. Raises `ModelLoadError` if the file is not one."""
    try:
        return _parse_model(path.read_bytes())
    except (IndexError, ValueError, TypeError, struct.error) as error:
        raise ModelLoadError(
            f"{path} is not a sentencepiece model ({error}). It may be truncated or not what its name says: "
            "download it again."
        ) from error


def _parse_model(data: bytes) -> PieceModel:
    pieces: list[Piece] = []
    trainer: dict[int, _Value] = {}
    normalizer: dict[int, _Value] = {}
    for number, value in _fields(data):
        if number == 1:
            pieces.append(_piece(_message(value)))
        elif number == 2:
            trainer = dict(_fields(_message(value)))
        elif number == 3:
            normalizer = dict(_fields(_message(value)))
    if not pieces:
        raise ValueError("no pieces in it")
    if not trainer or not normalizer:
        raise ValueError("its settings, which follow the pieces, are missing")
    model_type = _int(trainer, 3, _UNIGRAM)
    if model_type not in (_UNIGRAM, _BPE):
        raise UnsupportedModelError(
            f"The sentencepiece model has type {model_type} (word or char). Supported: unigram (1) and BPE (2)."
        )
    if not _int(normalizer, 5, 1) or _int(trainer, 24, 0):
        raise UnsupportedModelError(
            "The sentencepiece model does not escape spaces, or keeps them at the end of words "
            "(escape_whitespaces = false or treat_whitespace_as_suffix = true), which Quire does not support."
        )
    return PieceModel(
        pieces=pieces,
        is_unigram=model_type == _UNIGRAM,
        unk_id=_int(trainer, 40, 0),
        bos_id=_int(trainer, 41, 1),
        eos_id=_int(trainer, 42, 2),
        pad_id=_int(trainer, 43, -1),
        add_dummy_prefix=bool(_int(normalizer, 3, 1)),
        remove_extra_whitespaces=bool(_int(normalizer, 4, 1)),
        charsmap=_bytes(normalizer, 2),
    )


def _piece(data: bytes) -> Piece:
    fields = dict(_fields(data))
    (score,) = struct.unpack("<f", _bytes(fields, 2) or bytes(4))
    return Piece(_bytes(fields, 1).decode(), score, PieceKind(_int(fields, 3, PieceKind.NORMAL)))


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """Yield (field number, value) of one protobuf message; 32- and 64-bit values as their bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire_type == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(wire_type, -1)
        if size < 0 or at + size > len(data):
            raise ValueError(f"a field of wire type {wire_type} runs past byte {len(data)}")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _message(value: _Value) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a number where a message should be")
    return value


def _bytes(fields: dict[int, _Value], number: int) -> bytes:
    return _message(fields.get(number, b""))


def _int(fields: dict[int, _Value], number: int, default: int) -> int:
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise TypeError("a message where a number should be")
    # Negative int32 values travel as 64-bit two's complement.
    return value - (1 << 64) if value >= 1 << 63 else value


SPACE = "▁"  # U+2581 stands for a space inside pieces


class PieceKind(IntEnum):
    """What a piece is for; sentencepiece and GGUF use the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # never produced from text: <s>, </s>, [INST]
    USER_DEFINED = 4  # its text is always one token
    UNUSED = 5
    BYTE = 6  # "<0x0A>"


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True, slots=True)
class PieceModel:
    """A sentencepiece model: pieces by id, and how text is normalized before it is split into pieces."""

    pieces: Sequence[Piece]
    is_unigram: bool
    unk_id: int = 0
    bos_id: int = 1  # -1: none
    eos_id: int = 2
    pad_id: int = -1
    add_dummy_prefix: bool = True  # a text gets a space before it
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""  # sentencepiece's compiled normalization; empty: identity
    # In the order in which they are applied; None: that of the scores.
    merges: Sequence[tuple[str, str]] | None = None

    def text_of(self, token_id: int) -> str | None:
        """Return the piece at ``token_id``, or None if there is none."""
        return self.pieces[token_id].text if 0 <= token_id < len(self.pieces) else None


def pieces_backend(model: PieceModel, *, space_after_special: bool) -> Backend:
    """Return a tokenizer that splits text as sentencepiece does.

    ``space_after_special``: not only the start of the text gets the extra space, but also text after a special token,
    as in `LlamaTokenizer` ("legacy") and llama.cpp.
    """
    if not 0 <= model.unk_id < len(model.pieces):
        raise ModelLoadError(
            f"The vocabulary of {len(model.pieces)} pieces has its unknown token at id {model.unk_id}, which is "
            "outside. The tokenizer file is damaged: download it again."
        )
    backend = Backend(_unigram(model) if model.is_unigram else _bpe(model))
    steps: list[normalizers.Normalizer] = []
    if model.charsmap:
        steps.append(normalizers.Precompiled(model.charsmap))
    if model.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_dummy_prefix and space_after_special:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    if model.add_dummy_prefix and not space_after_special:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
    strip = [decoders.Strip(" ", 1, 0)] if model.add_dummy_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    add_tokens(backend, _matched_first(model.pieces))
    return backend


def _matched_first(pieces: Sequence[Piece]) -> dict[int, AddedToken]:
    """Return the pieces that are matched before the text is split. The merges find user-defined pieces with a space."""
    special = (PieceKind.CONTROL, PieceKind.UNKNOWN)
    return {
        token_id: AddedToken(piece.text, special=piece.kind in special, normalized=False)
        for token_id, piece in enumerate(pieces)
        if piece.kind in special or (piece.kind == PieceKind.USER_DEFINED and SPACE not in piece.text)
        if piece.text
    }


def _has_bytes(model: PieceModel) -> bool:
    return sum(piece.kind == PieceKind.BYTE for piece in model.pieces) == 256


def _bpe(model: PieceModel) -> BPE:
    made = (PieceKind.NORMAL, PieceKind.USER_DEFINED)
    ids = {piece.text: token_id for token_id, piece in enumerate(model.pieces)}
    usable = {text: token_id for text, token_id in ids.items() if model.pieces[token_id].kind in made}
    best_first = ((text, -model.pieces[token_id].score) for text, token_id in usable.items())
    return BPE(
        vocab=ids,
        merges=merges_by_rank(usable, best_first) if model.merges is None else list(model.merges),
        unk_token=model.pieces[model.unk_id].text,
        fuse_unk=True,
        byte_fallback=_has_bytes(model),
    )


def _unigram(model: PieceModel) -> Unigram:
    scored = [(piece.text, piece.score) for piece in model.pieces]
    return Unigram(scored, unk_id=model.unk_id, byte_fallback=_has_bytes(model))

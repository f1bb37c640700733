"""Vocabularies of scored pieces (sentencepiece, and GGUF's copy of it) into tokenizers: BPE and unigram."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, Unigram

from quire.errors import ModelLoadError
from quire.text.byte_level import add_tokens, merges_by_rank

SPACE = "▁"  # U+2581 stands for a space inside pieces


class PieceKind(IntEnum):
    """What a piece is for; sentencepiece and GGUF number them alike."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # never made from text: <s>, </s>, [INST]
    USER_DEFINED = 4  # always one token where its text occurs
    UNUSED = 5
    BYTE = 6  # "<0x0A>"


@dataclass(frozen=True, slots=True)
class Piece:
    text: str
    score: float
    kind: PieceKind


@dataclass(frozen=True, slots=True)
class PieceModel:
    """A sentencepiece model: pieces by id, and how text is normalized before it is cut into them."""

    pieces: Sequence[Piece]
    is_unigram: bool
    unk_id: int = 0
    bos_id: int = 1  # -1: none
    eos_id: int = 2
    pad_id: int = -1
    add_dummy_prefix: bool = True  # a text gets a space before it
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""  # sentencepiece's compiled Unicode normalization; empty for identity

    def text_of(self, token_id: int) -> str | None:
        """Return the piece at ``token_id``, or None where there is none."""
        return self.pieces[token_id].text if 0 <= token_id < len(self.pieces) else None


def pieces_backend(model: PieceModel, *, space_after_special: bool) -> Backend:
    """Return a tokenizer that cuts text as sentencepiece does.

    ``space_after_special``: the text after a special token gets the extra space too, as `LlamaTokenizer` ("legacy")
    and llama.cpp do, not only the start of the whole.
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
    """The pieces that are found in the text before it is cut. Those with a space in them the merges find as well."""
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
        merges=merges_by_rank(usable, best_first),
        unk_token=model.pieces[model.unk_id].text,
        fuse_unk=True,
        byte_fallback=_has_bytes(model),
    )


def _unigram(model: PieceModel) -> Unigram:
    scored = [(piece.text, piece.score) for piece in model.pieces]
    return Unigram(scored, unk_id=model.unk_id, byte_fallback=_has_bytes(model))

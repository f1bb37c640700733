"""Builds a tokenizer from the vocabulary in a GGUF file (`tokenizer.ggml.*` of the GGUF specification)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.text.byte_level import GGUF_SPLITTINGS, Splitting, add_bos_eos, byte_level_backend
from quire.text.sentencepiece import Piece, PieceKind, PieceModel, pieces_backend
from quire.text.token_text import token_text_of
from quire.text.tokenizer import SpecialTokens, Tokenizer

_PREFIX = "tokenizer.ggml."
_ROLE_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # the specification's spelling
    "mask_token": "mask_token_id",
}
_END_IDS = ("eot_token_id", "eom_token_id")


def tokenizer_from_gguf_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer from the key-value pairs of a GGUF file (already plain Python values).

    Raises `ModelLoadError` if a key is missing or inconsistent, `UnsupportedModelError` for a kind of vocabulary or
    splitting that is not supported.
    """
    kind = _get(metadata, "model")
    tokens = list(_get(metadata, "tokens"))
    if kind == "llama":
        add_bos_default = True
        backend = _pieces(metadata, tokens)
    elif kind == "gpt2":
        splitting = _splitting(metadata)
        add_bos_default = splitting.add_bos
        backend = _byte_level(metadata, tokens, splitting)
    else:
        raise UnsupportedModelError(
            f"The GGUF file's tokenizer is of kind {kind!r}. Supported: 'llama' (sentencepiece) and "
            "'gpt2' (byte-level)."
        )
    special = _special(metadata, tokens)
    add_bos = bool(metadata.get(_PREFIX + "add_bos_token", add_bos_default))
    add_eos = bool(metadata.get(_PREFIX + "add_eos_token", False))
    bos, eos = special.roles.get("bos_token"), special.roles.get("eos_token")
    add_bos_eos(backend, bos if add_bos else None, eos if add_eos else None)
    return Tokenizer(backend, token_text_of(backend), special, _chat_templates(metadata))


def _get(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(_PREFIX + key)
    if value is None:
        raise ModelLoadError(
            f"The GGUF file has no {_PREFIX}{key}, so its tokenizer cannot be built. Use a file that was converted "
            "with its vocabulary, or give the folder of the original model as tokenizer."
        )
    return value


def _kinds(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[PieceKind]:
    try:
        kinds = [PieceKind(kind) for kind in metadata.get(_PREFIX + "token_type") or [1] * len(tokens)]
    except ValueError as error:
        raise ModelLoadError(
            f"The GGUF file has a token of an unknown type ({error}; known are 1 to 6): "
            "it is damaged, or newer than Quire."
        ) from error
    if len(kinds) != len(tokens):
        raise ModelLoadError(
            f"The GGUF file has {len(tokens)} tokens but {len(kinds)} token types: it is damaged, download it again."
        )
    return kinds


def _pieces(metadata: Mapping[str, Any], tokens: Sequence[str]) -> Backend:
    scores = [float(score) for score in _get(metadata, "scores")]
    kinds = _kinds(metadata, tokens)
    if len(scores) != len(tokens):
        raise ModelLoadError(
            f"The GGUF file has {len(tokens)} tokens but {len(scores)} scores: it is damaged, download it again."
        )
    model = PieceModel(
        pieces=[Piece(*parts) for parts in zip(tokens, scores, kinds, strict=True)],
        is_unigram=False,
        unk_id=int(metadata.get(_PREFIX + "unknown_token_id", 0)),
        add_dummy_prefix=bool(metadata.get(_PREFIX + "add_space_prefix", True)),
        remove_extra_whitespaces=bool(metadata.get(_PREFIX + "remove_extra_whitespaces", False)),
    )
    # llama.cpp adds the space after every special token, too.
    return pieces_backend(model, space_after_special=True)


def _splitting(metadata: Mapping[str, Any]) -> Splitting:
    name = metadata.get(_PREFIX + "pre", "default")
    splitting = GGUF_SPLITTINGS.get(name)
    if splitting is None:
        raise UnsupportedModelError(
            f"The GGUF file splits text in the manner of {name!r} ({_PREFIX}pre), which Quire does not know. Known: "
            f"{', '.join(GGUF_SPLITTINGS)}. Give the folder of the original model as tokenizer."
        )
    return splitting


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], splitting: Splitting) -> Backend:
    kinds = _kinds(metadata, tokens)
    added = {
        token_id: AddedToken(token, special=kinds[token_id] == PieceKind.CONTROL, normalized=False)
        for token_id, token in enumerate(tokens)
        if kinds[token_id] in (PieceKind.CONTROL, PieceKind.USER_DEFINED)
    }
    merges = []
    for merge in _get(metadata, "merges"):
        # The first character belongs to the left part even if it is a space.
        cut = merge.find(" ", 1)
        merges.append((merge[:cut], merge[cut + 1 :]))
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    return byte_level_backend(vocab, merges, splitting, added, "The GGUF file")


def _special(metadata: Mapping[str, Any], tokens: Sequence[str]) -> SpecialTokens:
    def text_of(key: str) -> str | None:
        token_id = metadata.get(_PREFIX + key)
        return tokens[int(token_id)] if token_id is not None and 0 <= int(token_id) < len(tokens) else None

    roles = {role: text for role, key in _ROLE_IDS.items() if (text := text_of(key)) is not None}
    ends = tuple(text for key in _END_IDS if (text := text_of(key)) is not None)
    return SpecialTokens(roles=roles, end_of_text=ends)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template` is the default; named ones are `tokenizer.chat_template.NAME`."""
    key = "tokenizer.chat_template"
    templates = {"default": str(metadata[key])} if metadata.get(key) else {}
    for name in metadata.get("tokenizer.chat_templates") or ():
        if f"{key}.{name}" in metadata:
            templates[str(name)] = str(metadata[f"{key}.{name}"])
    return templates

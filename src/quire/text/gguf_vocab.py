"""Builds a tokenizer from the vocabulary in a GGUF file (`tokenizer.ggml.*` of the GGUF specification)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families.gguf import special_id
from quire.text.byte_level import GGUF_SPLITTINGS, Splitting, add_bos_eos, byte_level_backend
from quire.text.sentencepiece import Piece, PieceKind, PieceModel, pieces_backend
from quire.text.token_text import make_token_text
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
_END_IDS = (
    "eos_token_id",
    "eot_token_id",
    "eom_token_id",
    "fim_pad_token_id",
    "fim_rep_token_id",
    "fim_sep_token_id",
)
# Texts of tokens that end an answer in llama.cpp, whatever the file says of their ids. "</s>" is not among them: it is
# plain text in Qwen's vocabulary, and the end where a file says so.
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>",
    # Of infilling: what comes after a file or before another one.
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
}  # fmt: skip
# Where all of the first are in a vocabulary, the second stands between the parts of an answer.
_BETWEEN = ((("<|return|>", "<|call|>"), "<|end|>"), (("<|flush|>", "<|calls|>"), "<|end|>"))


def end_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end an answer: those that the file names, and those whose text says it, as in llama.cpp."""
    named = [special_id(metadata, key) for key in _END_IDS]
    by_text = _ends_by_text(metadata.get(_PREFIX + "tokens") or ())
    return tuple(dict.fromkeys(token_id for token_id in (*named, *by_text) if token_id is not None))


def _ends_by_text(tokens: Sequence[str]) -> list[int]:
    ids = {text: token_id for token_id, text in enumerate(tokens) if text in _ENDS}
    for marks, inner in _BETWEEN:
        if all(mark in ids for mark in marks):
            ids.pop(inner, None)
    return list(ids.values())


def tokenizer_from_gguf_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer from the key-value pairs of a GGUF file (already plain Python values).

    Raises `ModelLoadError` if a key is missing or inconsistent, `UnsupportedModelError` for a kind of vocabulary or
    splitting that is not supported.
    """
    kind = _get(metadata, "model")
    tokens = list(_get(metadata, "tokens"))
    if kind in ("llama", "gemma4"):
        add_bos_default = True
        backend = _pieces(metadata, tokens, _merges(metadata) if kind == "gemma4" else None)
    elif kind == "gpt2":
        splitting = _splitting(metadata)
        add_bos_default = splitting.add_bos
        backend = _byte_level(metadata, tokens, splitting)
    else:
        raise UnsupportedModelError(
            f"The GGUF file's tokenizer is of kind {kind!r}. Supported: 'llama' (sentencepiece), 'gpt2' (byte-level) "
            "and 'gemma4'."
        )
    special = _special(metadata, tokens)
    add_bos = bool(metadata.get(_PREFIX + "add_bos_token", add_bos_default))
    add_eos = bool(metadata.get(_PREFIX + "add_eos_token", False))
    bos, eos = special.roles.get("bos_token"), special.roles.get("eos_token")
    add_bos_eos(backend, bos if add_bos else None, eos if add_eos else None)
    return Tokenizer(backend, make_token_text(backend), special, _chat_templates(metadata))


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
        for token_id in _ends_by_text(tokens[: len(kinds)]):  # some files call them text
            kinds[token_id] = PieceKind.CONTROL
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


def _pieces(
    metadata: Mapping[str, Any], tokens: Sequence[str], merges: Sequence[tuple[str, str]] | None
) -> Backend:
    """``merges``: Gemma 4's, whose scores say nothing; None: the scores give them."""
    scores = [float(score) for score in _get(metadata, "scores")]
    kinds = _kinds(metadata, tokens)
    if len(scores) != len(tokens):
        raise ModelLoadError(
            f"The GGUF file has {len(tokens)} tokens but {len(scores)} scores: it is damaged, download it again."
        )
    model = PieceModel(
        pieces=[Piece(*parts) for parts in zip(tokens, scores, kinds, strict=True)],
        is_unigram=False,
        unk_id=special_id(metadata, "unknown_token_id") or 0,
        add_dummy_prefix=bool(metadata.get(_PREFIX + "add_space_prefix", merges is None)),
        remove_extra_whitespaces=bool(metadata.get(_PREFIX + "remove_extra_whitespaces", False)),
        merges=merges,
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
    added = _added(metadata, tokens)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    return byte_level_backend(vocab, _merges(metadata), splitting, added, "The GGUF file")


def _added(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[int, AddedToken]:
    """Return the tokens that are matched before text is split."""
    kinds = _kinds(metadata, tokens)
    return {
        token_id: AddedToken(token, special=kinds[token_id] == PieceKind.CONTROL, normalized=False)
        for token_id, token in enumerate(tokens)
        if kinds[token_id] in (PieceKind.CONTROL, PieceKind.USER_DEFINED)
    }


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    merges = []
    for merge in _get(metadata, "merges"):
        # The first character belongs to the left part even if it is a space.
        cut = merge.find(" ", 1)
        merges.append((merge[:cut], merge[cut + 1 :]))
    return merges


def _special(metadata: Mapping[str, Any], tokens: Sequence[str]) -> SpecialTokens:
    ids = {role: special_id(metadata, key) for role, key in _ROLE_IDS.items()}
    known = {
        role: token_id for role, token_id in ids.items() if token_id is not None and token_id < len(tokens)
    }
    ends = tuple(tokens[token_id] for token_id in end_ids(metadata) if token_id < len(tokens))
    return SpecialTokens(roles={role: tokens[token_id] for role, token_id in known.items()}, end_of_text=ends)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template` is the default; named ones are `tokenizer.chat_template.NAME`."""
    key = "tokenizer.chat_template"
    templates = {"default": str(metadata[key])} if metadata.get(key) else {}
    for name in metadata.get("tokenizer.chat_templates") or ():
        if f"{key}.{name}" in metadata:
            templates[str(name)] = str(metadata[f"{key}.{name}"])
    return templates

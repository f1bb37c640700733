"""Byte-level BPE tokenizers: built from their parts, with the expressions that split text (``splittings.toml``).

`load_tiktoken` reads rank files (`base64(token) rank` per line): OpenAI's encodings, Llama 3, Qwen 1. A rank file has
neither the splitting expression nor the special tokens, so known vocabularies (``encodings.toml``) are recognized by
their number of ranks. Merges are recovered from the ranks (`merges_by_rank`).
"""

from __future__ import annotations

import base64
import binascii
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreSequence
from tokenizers.processors import TemplateProcessing

from quire.errors import ModelLoadError
from quire.text.folder_config import FolderConfig
from quire.text.token_text import byte_level_token, make_token_text
from quire.text.tokenizer import SpecialTokens, Tokenizer


def byte_level_backend(
    vocab: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    splitting: Splitting,
    added: Mapping[int, AddedToken],
    source: str,
) -> Backend:
    """Return a byte-level BPE tokenizer. Raises `ModelLoadError`, naming ``source``, for merges of unknown tokens.

    ``vocab``: tokens in GPT-2's alphabet -> ids. ``added``: tokens by id that no merge produces. Their ids may have
    gaps, so they are entered into the vocabulary itself, where ids are free.
    """
    everything = {**vocab, **{token.content: token_id for token_id, token in added.items()}}
    try:
        model = BPE(vocab=everything, merges=list(merges), ignore_merges=splitting.whole_words_first)
    except Exception as error:  # the Rust side raises plain `Exception`
        raise ModelLoadError(
            f"{source}: the merges do not fit the vocabulary ({error}). The files are damaged, or they do not "
            "belong together: download them again from one repository."
        ) from error
    backend = Backend(model)
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizer(splitting.patterns)
    backend.decoder = decoders.ByteLevel()
    add_tokens(backend, added)
    return backend


def add_tokens(backend: Backend, added: Mapping[int, AddedToken]) -> None:
    """Register tokens that are matched before splitting, and check that each gets the id of its file."""
    for token_id, token in sorted(added.items()):
        backend.add_tokens([token])
        known_id = backend.token_to_id(token.content)
        if known_id != token_id:
            raise ModelLoadError(
                f"The added token {token.content!r} should have id {token_id} (added_tokens_decoder) but the "
                f"vocabulary gives it {known_id}: the tokenizer files do not belong together. Use all of them from one "
                "repository."
            )


def add_bos_eos(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Make ``backend`` put ``bos`` before and ``eos`` after a text; None: nothing."""
    names = [name for name in (bos, eos) if name is not None]
    backend.post_processor = TemplateProcessing(
        single=[*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])],
        special_tokens=[(name, backend.token_to_id(name)) for name in dict.fromkeys(names)],
    )


def merges_by_rank(ranks: Mapping[str, int], tokens: Iterable[tuple[str, float]]) -> list[tuple[str, str]]:
    """Return every pair of tokens that joins to a token, in the order in which BPE applies them.

    ``tokens``: tokens that may result from a merge, each with a sort key (smallest first). A token that several pairs
    can make gets all of them: sentencepiece and tiktoken join any two neighbours whose join is a token.
    """
    merges: list[tuple[float, int, int, str, str]] = []
    for token, key in tokens:
        for cut in range(1, len(token)):
            left = ranks.get(token[:cut])
            if left is not None:
                right = ranks.get(token[cut:])
                if right is not None:
                    merges.append((key, left, right, token[:cut], token[cut:]))
    merges.sort()
    return [(left, right) for _, _, _, left, right in merges]


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a byte-level vocabulary prepares text: an entry of ``splittings.toml``."""

    patterns: tuple[str, ...]
    whole_words_first: bool = False  # a piece that is itself a token is used without merging
    add_bos: bool = False
    nfc: bool = False  # Unicode normalization form C before splitting


_TABLE = tomllib.loads((files("quire.text") / "splittings.toml").read_text(encoding="utf-8"))
SPLITTINGS: Mapping[str, Splitting] = {
    name: Splitting(
        tuple(entry["patterns"]), **{k: v for k, v in entry.items() if k not in ("patterns", "gguf")}
    )
    for name, entry in _TABLE.items()
}
# By `tokenizer.ggml.pre`.
GGUF_SPLITTINGS: Mapping[str, Splitting] = {
    pre: SPLITTINGS[name] for name, entry in _TABLE.items() for pre in entry["gguf"]
}


def pre_tokenizer(patterns: tuple[str, ...]) -> PreTokenizer:
    """Return the pre-tokenizer that splits by ``patterns`` and then spells bytes in GPT-2's alphabet."""
    splits = [Split(Regex(pattern), behavior="isolated", invert=False) for pattern in patterns]
    return PreSequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


@dataclass(frozen=True, slots=True)
class Encoding:
    """What a rank file does not say: an entry of ``encodings.toml``."""

    splitting: Splitting
    special: Mapping[str, int]
    eos: tuple[str, ...]  # the first is the `eos_token`
    bos: str | None


def _encoding(entry: Mapping[str, Any]) -> Encoding:
    text, number, first_id, count = entry.get("numbered", ("", 0, 0, 0))
    numbered = {text.format(number + i): first_id + i for i in range(count)}
    bos = entry.get("bos")
    # tiktoken looks up the whole piece before it merges.
    splitting = replace(SPLITTINGS[entry["splitting"]], whole_words_first=True, add_bos=bos is not None)
    return Encoding(splitting, {**entry["special"], **numbered}, tuple(entry["eos"]), bos)


_ENCODINGS_TABLE = tomllib.loads((files("quire.text") / "encodings.toml").read_text())
# By number of ranks.
ENCODINGS: Mapping[int, Encoding] = {
    ranks: _encoding(entry) for entry in _ENCODINGS_TABLE.values() for ranks in entry["ranks"]
}


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a rank file. Raises `ModelLoadError` that names the line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ModelLoadError(
                f"{path}, line {number}: {line[:60]!r} is not `base64(token) rank`. The file is no tiktoken rank file, "
                "or it is damaged: download it again."
            ) from error
    return ranks


def load_tiktoken(path: Path, config: FolderConfig) -> Tokenizer:
    """Build the tokenizer of a rank file; ``config`` may add special tokens, roles and chat templates."""
    ranks = read_ranks(path)
    encoding = ENCODINGS.get(len(ranks))
    if encoding is None:
        raise ModelLoadError(
            f"{path} has {len(ranks)} ranks, which is none of the known tiktoken vocabularies (r50k, p50k, cl100k, "
            "o200k, Llama 3, Qwen), so its splitting expression is unknown. Use the model's tokenizer.json instead."
        )
    vocab = {byte_level_token(token): rank for token, rank in ranks.items()}
    longer = ((token, float(rank)) for token, rank in vocab.items() if len(token) > 1)
    added = {i: AddedToken(t, special=True, normalized=False) for t, i in encoding.special.items()}
    added.update(config.added_tokens)
    backend = byte_level_backend(vocab, merges_by_rank(vocab, longer), encoding.splitting, added, str(path))
    roles = {"eos_token": encoding.eos[0], **config.special.roles}
    if encoding.bos is not None:
        roles.setdefault("bos_token", encoding.bos)
    add_bos = encoding.splitting.add_bos if config.add_bos is None else config.add_bos
    add_bos_eos(
        backend, roles.get("bos_token") if add_bos else None, roles["eos_token"] if config.add_eos else None
    )
    ends = config.special.end_of_text or encoding.eos
    special = SpecialTokens(roles=roles, additional=config.special.additional, end_of_text=ends)
    return Tokenizer(backend, make_token_text(backend), special, config.chat_templates)

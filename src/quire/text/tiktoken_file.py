"""Builds tokenizers from tiktoken rank files (`base64(token) rank` per line): OpenAI's encodings, Llama 3, Qwen 1.

A rank file has neither the splitting expression nor the special tokens, so known vocabularies (``encodings.toml``) are
recognized by their number of ranks. Merges are recovered from the ranks (`merges_by_rank`).
"""

from __future__ import annotations

import base64
import binascii
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from quire.errors import ModelLoadError
from quire.text.byte_level import SPLITTINGS, Splitting, add_bos_eos, byte_level_backend, merges_by_rank
from quire.text.folder_config import FolderConfig
from quire.text.token_text import byte_level_token, token_text_of
from quire.text.tokenizer import SpecialTokens, Tokenizer


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


_TABLE = tomllib.loads((files("quire.text") / "encodings.toml").read_text())
# By number of ranks.
ENCODINGS: Mapping[int, Encoding] = {
    ranks: _encoding(entry) for entry in _TABLE.values() for ranks in entry["ranks"]
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
    return Tokenizer(backend, token_text_of(backend), special, config.chat_templates)

"""Builds tokenizers from tiktoken rank files (`base64(token) rank` per line): OpenAI's encodings, Llama 3, Qwen 1.

A rank file has neither the splitting expression nor the special tokens, so known vocabularies are recognized by their
number of ranks. Merges are recovered from the ranks (`merges_by_rank`).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken

from quire.errors import ModelLoadError
from quire.text.byte_level import (
    CL100K,
    GPT2,
    O200K,
    QWEN2,
    Splitting,
    add_bos_eos,
    byte_level_backend,
    merges_by_rank,
)
from quire.text.folder_config import FolderConfig
from quire.text.token_text import byte_level_token, token_text_of
from quire.text.tokenizer import SpecialTokens, Tokenizer


@dataclass(frozen=True, slots=True)
class Encoding:
    """What a rank file does not say."""

    splitting: Splitting
    special: Mapping[str, int]
    eos: tuple[str, ...]  # the first is the `eos_token`
    bos: str | None = None
    named: Mapping[str, str] = field(default_factory=dict)


def _llama3_special() -> dict[str, int]:
    """Llama 3's 256 special tokens (meta-llama/llama-models, `llama3/tokenizer.py`)."""
    names = "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id step_id "
    names += "start_header_id end_header_id eom_id eot_id python_tag image"
    tokens = [f"<|{name}|>" for name in names.split()]
    tokens += [f"<|reserved_special_token_{2 + i}|>" for i in range(256 - len(tokens))]
    return {token: 128000 + index for index, token in enumerate(tokens)}


def _qwen_special() -> dict[str, int]:
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))]
    return {token: 151643 + index for index, token in enumerate(tokens)}


def _splitting(pattern: str, *, add_bos: bool = False, nfc: bool = False) -> Splitting:
    # tiktoken looks up the whole piece before it merges.
    return Splitting((pattern,), whole_words_first=True, add_bos=add_bos, nfc=nfc)


_END = "<|endoftext|>"
_FIM = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
_CL100K_SPECIAL = {_END: 100257, **_FIM, "<|endofprompt|>": 100276}
_LLAMA3_EOS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")

# Number of ranks -> encoding. p50k leaves rank 50256 free for its special token.
ENCODINGS: Mapping[int, Encoding] = {
    50256: Encoding(_splitting(GPT2), {_END: 50256}, (_END,)),  # r50k_base, GPT-2
    50280: Encoding(_splitting(GPT2), {_END: 50256}, (_END,)),  # p50k_base
    100256: Encoding(_splitting(CL100K), _CL100K_SPECIAL, (_END,)),  # cl100k_base
    199998: Encoding(_splitting(O200K), {_END: 199999, "<|endofprompt|>": 200018}, (_END,)),  # o200k_base
    128000: Encoding(
        _splitting(CL100K, add_bos=True), _llama3_special(), _LLAMA3_EOS, bos="<|begin_of_text|>"
    ),
    151643: Encoding(_splitting(QWEN2, nfc=True), _qwen_special(), (_END, "<|im_end|>")),
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
    roles = {"eos_token": encoding.eos[0], **encoding.named, **config.special.roles}
    if encoding.bos is not None:
        roles.setdefault("bos_token", encoding.bos)
    add_bos = encoding.splitting.add_bos if config.add_bos is None else config.add_bos
    add_bos_eos(
        backend, roles.get("bos_token") if add_bos else None, roles["eos_token"] if config.add_eos else None
    )
    ends = config.special.end_of_text or encoding.eos
    special = SpecialTokens(roles=roles, additional=config.special.additional, end_of_text=ends)
    return Tokenizer(backend, token_text_of(backend), special, config.chat_templates)

"""A model folder's tokenizer as the `tokenizer.ggml.*` keys of a GGUF file.

Byte-level BPE becomes kind "gpt2", whose way of splitting text a name stands for (`splittings.toml`). BPE of
sentencepiece becomes kind "llama": a token's score is the rank of the first merge that makes it, negated. What is
written is read back, and must encode some text as the folder's own tokenizer does.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.errors import UnsupportedModelError
from quire.text.byte_level import GGUF_SPLITTINGS, SPLITTINGS
from quire.text.gguf_vocab import tokenizer_from_gguf_metadata
from quire.text.sentencepiece import PieceKind
from quire.text.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
_ROLE_KEYS = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip
_SAMPLES = (
    "It was a dark and stormy night; the rain fell in torrents.",
    "  def f(x):\n\treturn x**2 + 1234567  # 3.14\n\n\n",
    "Straße, naïve café — 東京へ行きます。 🙂 I'm they'll DON'T",
    "a" * 40 + "  \t \r\n" + "!?" * 9,
    # NFC composes these, as it does with text that was typed on a Mac.
    "cafe\u0301, n\u0303",
)


def vocabulary(tokenizer: Tokenizer, num_rows: int, end_ids: Sequence[int], where: str) -> dict[str, Any]:
    """Return the keys of ``tokenizer`` for an embedding of ``num_rows``; ``where``: the folder, for errors.

    ``end_ids``: the ids that end an answer, which are written as far as there are keys.

    Raises:
        UnsupportedModelError: GGUF has no such tokenizer.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder) / "tokenizer.json")
        document = json.loads((Path(folder) / "tokenizer.json").read_text())
    model = document["model"]
    if model.get("type") != "BPE":
        raise UnsupportedModelError(
            f"{where}: GGUF is written with BPE tokenizers alone, and this one is {model.get('type')}"
        )
    steps = _steps(document.get("pre_tokenizer"))
    keys = (
        _byte_level(document, steps, num_rows, where)
        if any(step["type"] == "ByteLevel" for step in steps)
        else _pieces(document, num_rows)
    )
    own = tokenizer.encode("")
    keys |= _special(tokenizer, end_ids, own)
    keys |= _templates(tokenizer.chat_templates)
    _check(tokenizer, {f"{_PREFIX}{key}" if "." not in key else key: v for key, v in keys.items()}, where)
    return {f"{_PREFIX}{key}" if "." not in key else key: value for key, value in keys.items()}


def _check(tokenizer: Tokenizer, keys: Mapping[str, Any], where: str) -> None:
    """Raise `UnsupportedModelError` where what is written encodes a sample otherwise."""
    written = tokenizer_from_gguf_metadata(keys)
    ends = (*tokenizer.special.roles.values(), *tokenizer.special.additional)
    for sample in (*_SAMPLES, "".join(f"{end}x\n" for end in ends)):
        if written.encode(sample) != tokenizer.encode(sample):
            raise UnsupportedModelError(
                f"{where}: the keys of a GGUF file do not say what this tokenizer does: of {sample[:40]!r} a reader of "
                "the file would make other tokens"
            )


def _steps(pre_tokenizer: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [step for part in pre_tokenizer["pretokenizers"] for step in _steps(part)]
    return [pre_tokenizer]


def _byte_level(
    document: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], num_rows: int, where: str
) -> dict[str, Any]:
    patterns = tuple(pattern for step in steps for pattern in _patterns(step))
    whole_words_first = bool(document["model"].get("ignore_merges"))
    nfc = (document.get("normalizer") or {}).get("type") == "NFC"
    names = [
        name
        for name, splitting in GGUF_SPLITTINGS.items()
        if splitting.patterns == patterns and splitting.whole_words_first == whole_words_first
    ]
    # llama.cpp normalizes no text, so a name that differs in that alone says the same to it.
    names.sort(key=lambda name: GGUF_SPLITTINGS[name].nfc != nfc)
    if not names:
        raise UnsupportedModelError(
            f"{where}: the tokenizer splits text in a way that no name of GGUF stands for: {patterns}"
        )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    tokens, kinds = _tokens(document, num_rows)
    return {"model": "gpt2", "pre": names[0], "tokens": tokens, "token_type": kinds, "merges": merges}


def _patterns(step: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the expressions by which one step splits."""
    kind = step["type"]
    if kind == "ByteLevel":
        return SPLITTINGS["gpt2"].patterns if step.get("use_regex", True) else ()
    if kind == "Digits" and step.get("individual_digits"):
        return (r"\p{N}",)
    if kind == "Split" and "Regex" in step["pattern"]:
        return (step["pattern"]["Regex"],)
    return (f"a step of type {kind}",)


def _tokens(document: Mapping[str, Any], num_rows: int) -> tuple[list[str], list[int]]:
    """Return the token of each row of the embedding, and its kind."""
    added = {token["id"]: token for token in document["added_tokens"]}
    texts = {number: text for text, number in document["model"]["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(num_rows)]
    kinds = [
        PieceKind.UNUSED if number not in texts
        else PieceKind.NORMAL if number not in added
        else PieceKind.CONTROL if added[number]["special"] else PieceKind.USER_DEFINED
        for number in range(num_rows)
    ]  # fmt: skip
    return tokens, [int(kind) for kind in kinds]


def _pieces(document: Mapping[str, Any], num_rows: int) -> dict[str, Any]:
    tokens, kinds = _tokens(document, num_rows)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(document["model"]["merges"]):
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    for number, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kinds[number] = int(PieceKind.BYTE)
        elif token == document["model"].get("unk_token"):
            kinds[number] = int(PieceKind.UNKNOWN)
    last = len(ranks)
    text = json.dumps(document.get("normalizer")) + json.dumps(document.get("pre_tokenizer"))
    prefixed = (
        '"Prepend"' in text or '"prepend_scheme": "first"' in text or '"prepend_scheme": "always"' in text
    )
    return {
        "model": "llama", "pre": "default", "tokens": tokens,
        "scores": [float(-ranks.get(token, last)) for token in tokens], "token_type": kinds,
        "add_space_prefix": prefixed,
    }  # fmt: skip


def _special(tokenizer: Tokenizer, end_ids: Sequence[int], own: Sequence[int]) -> dict[str, Any]:
    """Return ids by role, and what a text gets around it; ``own``: the tokens of an empty text."""
    ids = {role: tokenizer.token_to_id(text) for role, text in tokenizer.special.roles.items()}
    keys: dict[str, Any] = {key: ids[role] for role, key in _ROLE_KEYS.items() if ids.get(role) is not None}
    ends = [number for number in end_ids if number != keys.get("eos_token_id")]
    if ends and "eos_token_id" not in keys:
        keys["eos_token_id"] = ends.pop(0)
    for key, number in zip(("eot_token_id", "eom_token_id"), ends, strict=False):
        keys[key] = number
    keys["add_bos_token"] = keys.get("bos_token_id") in own
    keys["add_eos_token"] = keys.get("eos_token_id") in own
    return keys


def _templates(templates: Mapping[str, str]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if "default" in templates:
        keys["tokenizer.chat_template"] = templates["default"]
    named = [name for name in templates if name != "default"]
    if named:
        keys["tokenizer.chat_templates"] = named
    return keys | {f"tokenizer.chat_template.{name}": templates[name] for name in named}

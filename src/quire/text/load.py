"""`load_tokenizer`: finds the tokenizer files of a model folder, in any of their forms, and builds the tokenizer.

Hugging Face's two forms are read here: `tokenizer.json`, and `vocab.json` with `merges.txt` (GPT-2, Qwen2).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.text.byte_level import SPLITTINGS, add_bos_eos, add_tokens, byte_level_backend, load_tiktoken
from quire.text.folder_config import FolderConfig, read_folder_config, read_json, read_text
from quire.text.token_text import make_token_text
from quire.text.tokenizer import SpecialTokens, Tokenizer

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")
_LFS_POINTER = b"version https://git-lfs"
FORMS = "tokenizer.json; vocab.json with merges.txt; a sentencepiece or tiktoken tokenizer.model; *.tiktoken"


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer in ``path``: a model folder, or one file if the form needs no other.

    In a folder, the first of these that exists is read: tokenizer.json; vocab.json + merges.txt; tokenizer.model;
    *.tiktoken; the newest *.model.vN (Mistral). Raises `ModelLoadError` if files are missing or damaged.
    """
    if not path.exists():
        raise ModelLoadError(f"There is no {path}. Give a model folder that has one of: {FORMS}.")
    if path.is_file():
        return _load_file(path, read_folder_config(path.parent))
    config = read_folder_config(path)
    if (path / "tokenizer.json").is_file():
        return load_tokenizer_json(path / "tokenizer.json", config)
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        return load_vocab_and_merges(path, config)
    candidates = [path / "tokenizer.model", *sorted(path.glob("*.tiktoken"))]
    candidates += sorted(path.glob("*.model.v*"), key=_version, reverse=True)
    for candidate in candidates:
        if candidate.is_file():
            return _load_file(candidate, config)
    raise ModelLoadError(
        f"The folder {path} has no tokenizer. Expected one of: {FORMS}. Download these files too, or name another "
        "folder as tokenizer."
    )


def _version(path: Path) -> int:
    digits = re.search(r"\.v(\d+)$", path.name)
    return int(digits[1]) if digits else 0


def _load_file(path: Path, config: FolderConfig) -> Tokenizer:
    if path.suffix == ".json":
        return load_tokenizer_json(path, config)
    with path.open("rb") as file:
        head = file.read(4096)
    if head.startswith(_LFS_POINTER):
        raise ModelLoadError(
            f"{path} is a Git LFS pointer, not the file itself. Fetch it with `git lfs pull` or download it again."
        )
    # Llama 3's rank file is also called tokenizer.model, so the contents decide.
    if _RANK_LINE.match(head):
        return load_tiktoken(path, config)
    from quire.text.sentencepiece import load_sentencepiece

    return load_sentencepiece(path, config)


_END_OF_TEXT = "<|endoftext|>"
# vocab.json does not have the splitting expression; the class that tokenizer_config.json names implies it.
_SPLITTINGS = {
    "Qwen2Tokenizer": SPLITTINGS["qwen2"],
    "Qwen2TokenizerFast": SPLITTINGS["qwen2"],
    "GPT2Tokenizer": SPLITTINGS["gpt2"],
    "GPT2TokenizerFast": SPLITTINGS["gpt2"],
}


def load_tokenizer_json(path: Path, config: FolderConfig) -> Tokenizer:
    """Build the tokenizer of a tokenizer.json, with the additions of tokenizer_config.json."""
    backend = _read_backend(path)
    known = backend.get_added_tokens_decoder()
    add_tokens(
        backend, {i: token for i, token in config.added_tokens.items() if _differs(known.get(i), token)}
    )
    _add_missing(backend, config.special)
    _match_special_as_written(backend)
    _apply_flags(backend, config)
    # transformers ignores the clean-up for BPE, where it would remove real spaces.
    is_bpe = type(backend.model).__name__ == "BPE"
    rule = make_token_text(backend, clean_up=config.clean_up_spaces and not is_bpe)
    return Tokenizer(backend, rule, config.special, config.chat_templates)


def _apply_flags(backend: Backend, config: FolderConfig) -> None:
    """Apply add_bos_token and add_eos_token; the side of a flag that is not there stays as tokenizer.json has it."""
    roles, own = config.special.roles, backend.encode("").tokens
    bos, eos = roles.get("bos_token"), roles.get("eos_token")
    has = (bos in own, eos in own)
    wanted = (
        bos is not None and (has[0] if config.add_bos is None else config.add_bos),
        eos is not None and (has[1] if config.add_eos is None else config.add_eos),
    )
    flagged = config.add_bos is not None or config.add_eos is not None
    if backend.post_processor is None or (flagged and wanted != has):
        add_bos_eos(backend, bos if wanted[0] else None, eos if wanted[1] else None)


def _read_backend(path: Path) -> Backend:
    try:
        return Backend.from_str(read_text(path))
    except Exception as error:  # the Rust side raises plain `Exception`
        repaired = _with_paired_merges(path)
        if repaired is not None:
            return Backend.from_str(repaired)
        raise ModelLoadError(
            f"{path} is not a tokenizer.json that can be read ({error}). It may be truncated or written by a newer "
            "version of `tokenizers`: download it again, or upgrade `tokenizers`."
        ) from error


def _with_paired_merges(path: Path) -> str | None:
    """Return the file with its merges as pairs, or None if that is impossible.

    In the old form a merge is one string ("a b"). If tokens themselves have spaces, that is ambiguous, and `tokenizers`
    rejects it; the vocabulary tells where such a string divides.
    """
    try:
        document = json.loads(read_text(path))
        model = document["model"]
        model["merges"] = [_divided(merge, model["vocab"]) for merge in model["merges"]]
    except (ValueError, KeyError, TypeError):
        return None
    return json.dumps(document)


def _divided(merge: str, vocab: dict[str, int]) -> tuple[str, str]:
    cuts = [at for at, char in enumerate(merge) if char == " "]
    pairs = [(merge[:at], merge[at + 1 :]) for at in cuts]
    fitting = [(a, b) for a, b in pairs if a in vocab and b in vocab and a + b in vocab]
    if len(fitting) != 1:
        raise ValueError(f"the merge {merge!r} divides in {len(fitting)} ways")
    return fitting[0]


def _differs(known: AddedToken | None, wanted: AddedToken) -> bool:
    return known is None or repr(known) != repr(wanted)


def _add_missing(backend: Backend, special: SpecialTokens) -> None:
    """Add tokens that have a role but are in no list of added tokens. They are special; a new one gets the next id."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for text in (*special.roles.values(), *special.additional):
        if text not in known:
            backend.add_tokens([AddedToken(text, special=True, normalized=False)])


def _match_special_as_written(backend: Backend) -> None:
    """Match special tokens in the raw text. Old Llama files normalize them first, which turns "</s>" into "▁</s>"."""
    for token in backend.get_added_tokens_decoder().values():
        if token.special and token.normalized:
            flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
            backend.add_tokens([AddedToken(token.content, special=True, normalized=False, **flags)])


def load_vocab_and_merges(folder: Path, config: FolderConfig) -> Tokenizer:
    """Build a byte-level BPE tokenizer from vocab.json, merges.txt and the added tokens of tokenizer_config.json."""
    vocab = {str(token): int(token_id) for token, token_id in read_json(folder / "vocab.json").items()}
    if not vocab:
        raise ModelLoadError(f"{folder / 'vocab.json'} is empty. Download it again.")
    class_name = read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    if class_name is None:
        splitting = _SPLITTINGS["GPT2Tokenizer"]
    elif class_name in _SPLITTINGS:
        splitting = _SPLITTINGS[class_name]
    else:
        raise ModelLoadError(
            f"{folder} has vocab.json and merges.txt for the class {class_name!r}, whose way of splitting text is "
            f"unknown. Known: {', '.join(_SPLITTINGS)}. Download the model's tokenizer.json too."
        )
    if config.add_prefix_space:
        raise UnsupportedModelError(
            f"{folder / 'tokenizer_config.json'} asks for a space before every text (add_prefix_space), which Quire "
            "does not add to vocab.json and merges.txt. Download the model's tokenizer.json too."
        )
    added = dict(config.added_tokens)
    special = config.special
    if not special.roles and _END_OF_TEXT in vocab:
        special = SpecialTokens(roles=dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT))
    for text in special.roles.values():
        if text in vocab and vocab[text] not in added:
            added[vocab[text]] = AddedToken(text, special=True, normalized=False)
    merges_path = folder / "merges.txt"
    backend = byte_level_backend(vocab, _read_merges(merges_path), splitting, added, str(merges_path))
    bos = special.roles.get("bos_token") if config.add_bos else None
    add_bos_eos(backend, bos, special.roles.get("eos_token") if config.add_eos else None)
    return Tokenizer(backend, make_token_text(backend), special, config.chat_templates)


def _read_merges(path: Path) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip() or line.startswith("#version"):
            continue
        left, _, right = line.rstrip("\r").partition(" ")
        if not right or " " in right:
            raise ModelLoadError(
                f"{path}, line {number}: {json.dumps(line[:60])} is not two tokens. Download it again."
            )
        merges.append((left, right))
    return merges

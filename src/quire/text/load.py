"""`load_tokenizer`: find the tokenizer of a model folder, in whichever form it is, and build it."""

from __future__ import annotations

import re
from pathlib import Path

from quire.errors import ModelLoadError
from quire.text.folder_config import FolderConfig, read_folder_config
from quire.text.hf_folder import load_tokenizer_json, load_vocab_and_merges
from quire.text.sentencepiece_file import load_sentencepiece
from quire.text.tiktoken_file import load_tiktoken
from quire.text.tokenizer import Tokenizer

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")
_LFS_POINTER = b"version https://git-lfs"
FORMS = "tokenizer.json; vocab.json with merges.txt; a sentencepiece or tiktoken tokenizer.model; *.tiktoken"


def load_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer in ``path``: a model folder, or one file of a form that stands alone.

    In a folder the first of these wins: tokenizer.json; vocab.json + merges.txt; tokenizer.model; *.tiktoken; the
    newest *.model.vN (Mistral). Raises `ModelLoadError` for files that are missing or broken.
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
    # Llama 3 calls its rank file tokenizer.model, so the contents decide.
    if _RANK_LINE.match(head):
        return load_tiktoken(path, config)
    return load_sentencepiece(path, config)

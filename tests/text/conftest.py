"""Tokenizers of the shared data, loaded once for all tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from quire.text.load import load_tokenizer
from quire.text.tokenizer import Tokenizer

Load = Callable[[str], Tokenizer]

# Names of vocabularies in golden_ids.json -> the files that hold them.
GOLDEN_FILES = {
    "r50k_base(gpt2)": ["gpt2", "tiktoken/r50k_base.tiktoken"],
    "cl100k_base": ["tiktoken/cl100k_base.tiktoken"],
    "o200k_base": ["tiktoken/o200k_base.tiktoken"],
    "llama3": ["llama3"],
    "qwen2": ["qwen2", "qwen2/qwen.tiktoken"],
    "llama2": ["llama2", "llama2/tokenizer.model", "phi-3-mini"],
    "mistral-v3": ["mistral/mistral_instruct_tokenizer_240323.model.v3"],
}


@pytest.fixture(scope="session")
def tokenizers_folder(shared_data: Path) -> Path:
    return shared_data / "tokenizers"


@pytest.fixture(scope="session")
def load(tokenizers_folder: Path) -> Load:
    """Load by path inside the tokenizers folder; each file is read once per session."""
    return lru_cache(maxsize=None)(lambda name: load_tokenizer(tokenizers_folder / name))


@pytest.fixture(scope="session")
def golden(tokenizers_folder: Path) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((tokenizers_folder / "golden_ids.json").read_text())
    return cases

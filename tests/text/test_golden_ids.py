"""golden_ids.json: 264 texts in about 250 languages, 7 vocabularies, every file form of each."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from tests.text.conftest import GOLDEN_FILES, Load

CASES = [(name, path) for name, paths in GOLDEN_FILES.items() for path in paths]

# This copy of Llama 2's tokenizer.json has spaces in place of its no-break spaces (vocabulary and merges), so that it
# is not readable by `tokenizers` at all and cannot encode U+00A0 as one token. The other two forms are intact.
DAMAGED = "llama2"


@pytest.mark.parametrize(("name", "path"), CASES)
def test_ids_equal_the_goldens(name: str, path: str, load: Load, golden: list[dict[str, Any]]) -> None:
    tokenizer = load(path)
    cases = [case for case in golden if not (path == DAMAGED and "\u00a0" in case["text"])]
    assert len(cases) >= 262
    wrong = [
        c["id"] for c in cases if tokenizer.encode(c["text"], add_special_tokens=False) != c["ids"][name]
    ]
    assert not wrong


@pytest.mark.parametrize(("name", "path"), CASES)
def test_decode_gives_the_text_back(name: str, path: str, load: Load, golden: list[dict[str, Any]]) -> None:
    tokenizer = load(path)
    normalized = unicodedata.normalize if name == "qwen2" else lambda _, text: text
    cases = [case for case in golden if not (path == DAMAGED and "\u00a0" in case["text"])]
    for case in cases:
        assert tokenizer.decode(case["ids"][name]) == normalized("NFC", case["text"]), case["id"]


@pytest.mark.parametrize(("name", "path"), CASES)
def test_token_bytes_add_up_to_the_text(
    name: str, path: str, load: Load, golden: list[dict[str, Any]]
) -> None:
    tokenizer = load(path)
    for case in golden[::7]:
        ids = tokenizer.encode(case["text"], add_special_tokens=False)
        joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
        assert joined == tokenizer.decode(ids, continues=True).encode()


# The library does not skip the special tokens of the old Llama 2 file, which are marked as normalized.
@pytest.mark.parametrize(("name", "path"), [case for case in CASES if case[1] != DAMAGED])
def test_decode_equals_the_library_on_valid_text(
    name: str, path: str, load: Load, golden: list[dict[str, Any]]
) -> None:
    tokenizer = load(path)
    for case in golden[::5]:
        ids = [*tokenizer.encode(case["text"]), *sorted(tokenizer.special_token_ids)[:3]]
        for skip in (True, False):
            expected = tokenizer._backend.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected

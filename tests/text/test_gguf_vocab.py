"""Vocabularies of GGUF files: llama.cpp's own tokenizer tests, and metadata made from other forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.text.conftest import Load
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers
from tokenizers.models import BPE

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.gguf_file import read_gguf
from quire.text.byte_level import GGUF_SPLITTINGS, merges_by_rank, pre_tokenizer
from quire.text.gguf_vocab import tokenizer_from_gguf_metadata
from quire.text.load import load_tokenizer
from quire.text.tokenizer import Tokenizer


def metadata_of(path: Path) -> Mapping[str, Any]:
    return read_gguf(path).metadata


def cases_of(tokenizers_folder: Path, name: str) -> list[tuple[str, list[int]]]:
    folder = tokenizers_folder / "ggml_vocab"
    texts = (folder / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = (folder / f"ggml-vocab-{name}.gguf.out").read_text().split("\n")
    cases = [(text, [int(i) for i in line.split()]) for text, line in zip(texts, ids, strict=False)]
    assert len(cases) >= 46
    return cases


def wrong(tokenizer: Tokenizer, cases: list[tuple[str, list[int]]]) -> list[str]:
    return [text for text, ids in cases if tokenizer.encode(text, add_special_tokens=False) != ids]


@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "phi-3"])
def test_the_tests_of_llama_cpp(name: str, tokenizers_folder: Path) -> None:
    metadata = metadata_of(tokenizers_folder / "ggml_vocab" / f"ggml-vocab-{name}.gguf")
    tokenizer = tokenizer_from_gguf_metadata(metadata)
    assert not wrong(tokenizer, cases_of(tokenizers_folder, name))
    if name == "phi-3":
        assert tokenizer.chat_templates["default"].startswith("{{ bos_token }}")
        assert tokenizer.bos_token_id == 1
        assert tokenizer.eos_token_ids == (32000, 32007)
        assert tokenizer.encode("Hi")[0] == 1


@pytest.mark.parametrize(("name", "path"), [("llama-bpe", "llama3"), ("qwen2", "qwen2"), ("mpt", "gpt-neox")])
def test_the_tests_of_llama_cpp_on_other_forms(
    name: str, path: str, load: Load, tokenizers_folder: Path
) -> None:
    assert not wrong(load(path), cases_of(tokenizers_folder, name))


def test_deepseek_splits_digits_and_letters_of_case_apart() -> None:
    splitter = pre_tokenizer(GGUF_SPLITTINGS["deepseek-llm"].patterns)
    text = "Hello world, it's 2024!\n  中文abc ＡＢＣ。 x "
    pieces = [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)]
    assert pieces == [
        "Hello", " world", ",", " it", "'", "s", " ", "2", "0", "2", "4", "!", "\n", "  ", "中文", "abc", " ＡＢＣ",
        "。", " x", " ",
    ]  # fmt: skip


# Where the splittings of newer vocabularies differ from those of Qwen 2 and GPT-4o: combining marks (Devanagari), line
# breaks after signs, Han characters next to letters, digits.
@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("qwen2", "नमस्ते x", ["नमस", "्त", "े", " x"]),
        ("qwen35", "नमस्ते x!\n 12", ["नमस्ते", " x", "!\n", " ", "1", "2"]),
        ("seed-coder", "it's !\n\n12", ["it", "'s", " !", "\n\n", "1", "2"]),
        ("qwen2", "it's !\n\n12", ["it", "'s", " !\n\n", "1", "2"]),
        ("kimi-k2", "abc中文Def's 1234", ["abc", "中文", "Def's", " ", "123", "4"]),
        ("minimax-m2", "abc中文Def's 1234", ["abc中文", "Def's", " ", "123", "4"]),
        ("exaone4", "abc 1234's", ["abc", " 1234", "'s"]),
    ],
)
def test_newer_vocabularies_split(pre: str, text: str, pieces: list[str]) -> None:
    splitter = pre_tokenizer(GGUF_SPLITTINGS[pre].patterns)
    assert [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(
    ("name", "path", "pre"), [("llama-bpe", "llama3", "llama-bpe"), ("qwen2", "qwen2", "qwen2")]
)
def test_metadata_made_from_another_form(
    name: str, path: str, pre: str, load: Load, tokenizers_folder: Path, golden: list[dict[str, Any]]
) -> None:
    source = load(path)
    tokens = [source.id_to_token(i) or f"[PAD{i}]" for i in range(source.vocab_size)]
    ranks = {token: i for i, token in enumerate(tokens) if i not in source.special_token_ids}
    merges = merges_by_rank(ranks, ((token, float(i)) for token, i in ranks.items() if len(token) > 1))
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i in source.special_token_ids else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": 0 if source.bos_token_id is None else source.bos_token_id,
        "tokenizer.ggml.eos_token_id": source.eos_token_ids[0],
        "tokenizer.ggml.eot_token_id": source.eos_token_ids[-1],
        "tokenizer.chat_template": "D",
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "T",
    }
    tokenizer = tokenizer_from_gguf_metadata(metadata)
    assert not wrong(tokenizer, cases_of(tokenizers_folder, name))
    key = "llama3" if path == "llama3" else "qwen2"
    assert all(tokenizer.encode(c["text"], add_special_tokens=False) == c["ids"][key] for c in golden)
    assert tokenizer.special_token_ids == source.special_token_ids
    assert tokenizer.encode("Hi") == source.encode("Hi"), "BOS as the name of the splitting says"
    assert tokenizer.eos_token_ids[0] == source.eos_token_ids[0]
    assert tokenizer.chat_templates == {"default": "D", "tool_use": "T"}


def test_stories260k_equals_its_other_forms(shared_data: Path) -> None:
    folder = shared_data / "models" / "stories260K"
    from_gguf = tokenizer_from_gguf_metadata(metadata_of(folder / "stories260K-f32.gguf"))
    from_json = load_tokenizer(folder / "hf")
    from_model = load_tokenizer(folder / "hf" / "tokenizer.model")
    lines = (shared_data / "text" / "tinystories_sample.txt").read_text().splitlines()[:300]
    for line in lines:
        ids = from_json.encode(line)
        assert from_gguf.encode(line) == ids
        assert from_model.encode(line) == ids
        assert from_gguf.decode(ids) == line
    golden = json.loads((folder / "golden.json").read_text())
    assert golden


def test_gemma_4_joins_pieces_in_the_order_of_its_merges() -> None:
    """As its tokenizer.json: spaces are ▁, merges have an order, and what has no piece is bytes."""
    letters = ["▁", "a", "b", "c", "\n"]
    merges = [("b", "c"), ("a", "b"), ("▁", "a"), ("▁", "▁"), ("▁a", "bc")]
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
    joined = [left + right for left, right in merges]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*special, *byte_pieces, *letters, *joined]
    kinds = [3, 3, 3, 2, 3] + [6] * 256 + [1] * (len(letters) + len(joined))
    backend = Backend(
        BPE(
            {text: i for i, text in enumerate(tokens)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.add_special_tokens(special)
    tokenizer = tokenizer_from_gguf_metadata(
        {
            "tokenizer.ggml.model": "gemma4",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [-1000.0] * len(tokens),
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 3,
            "tokenizer.ggml.add_space_prefix": False,
            "tokenizer.ggml.add_bos_token": True,
        }
    )
    for text in ("abc", " abc  ab", "ac\n\nabc", "é abc<turn|>a", "   a"):
        expected = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.encode(text) == [2, *expected]
        assert tokenizer.decode(expected) == text.replace("<turn|>", "")
    assert set(tokenizer.eos_token_ids) == {1, 4}


def test_errors(tokenizers_folder: Path) -> None:
    good = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "a", "b", "ab"],
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -0.5],
        "tokenizer.ggml.token_type": [2, 1, 1, 1],
        "tokenizer.ggml.add_bos_token": False,
    }
    with_space = tokenizer_from_gguf_metadata({**good, "tokenizer.ggml.add_space_prefix": False})
    assert with_space.encode("abba") == [3, 2, 1]
    for key in ("model", "tokens", "scores"):
        metadata = {name: value for name, value in good.items() if name != f"tokenizer.ggml.{key}"}
        with pytest.raises(ModelLoadError, match=f"tokenizer.ggml.{key}"):
            tokenizer_from_gguf_metadata(metadata)
    with pytest.raises(ModelLoadError, match="4 tokens but 1 scores"):
        tokenizer_from_gguf_metadata({**good, "tokenizer.ggml.scores": [0.0]})
    with pytest.raises(ModelLoadError, match="unknown type"):
        tokenizer_from_gguf_metadata({**good, "tokenizer.ggml.token_type": [2, 1, 1, 9]})
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        tokenizer_from_gguf_metadata({**good, "tokenizer.ggml.model": "bert"})
    byte_level = {**good, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a b"]}
    with pytest.raises(UnsupportedModelError, match=r"'klingon'.*llama-bpe"):
        tokenizer_from_gguf_metadata({**byte_level, "tokenizer.ggml.pre": "klingon"})
    with pytest.raises(ModelLoadError, match="do not fit"):
        tokenizer_from_gguf_metadata(
            {**byte_level, "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.merges": ["x y"]}
        )

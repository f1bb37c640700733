"""Loading: every form of file, what the configuration files add, and clear errors for missing or damaged files."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
from tests.text.conftest import Load

from quire.errors import ModelLoadError, RequestError, UnsupportedModelError
from quire.text.load import load_tokenizer


def test_bos_eos_and_sizes(load: Load) -> None:
    expected = {
        "gpt2": (50257, 50256, (50256,)),
        "tiktoken/p50k_base.tiktoken": (50281, None, (50256,)),
        "tiktoken/cl100k_base.tiktoken": (100277, None, (100257,)),
        "llama3": (128256, 128000, (128001, 128008, 128009)),
        "qwen2": (151646, None, (151643,)),
        "llama2": (32000, 1, (2,)),
        "llama2/tokenizer.model": (32000, 1, (2,)),
        "phi-3-mini": (32011, 1, (32000,)),
        "mistral/tokenizer.model.v1": (32000, 1, (2,)),
    }
    found = {name: (t.vocab_size, t.bos_token_id, t.eos_token_ids) for name in expected for t in [load(name)]}
    assert found == expected


def test_bos_is_added_where_the_model_expects_it(load: Load) -> None:
    for name, bos in (("llama2", [1]), ("llama2/tokenizer.model", [1]), ("llama3", [128000])):
        tokenizer = load(name)
        assert tokenizer.encode("Hi")[:1] == bos
        assert tokenizer.encode("Hi")[1:] == tokenizer.encode("Hi", add_special_tokens=False)
    for name in ("gpt2", "qwen2", "phi-3-mini"):
        assert load(name).encode("Hi") == load(name).encode("Hi", add_special_tokens=False)


def test_tokenizer_config_decides_about_bos(tokenizers_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tokenizers_folder / "phi-3-mini" / "tokenizer.json", tmp_path)
    config = {
        "bos_token": "<s>",
        "eos_token": {"content": "<|end|>"},
        "add_bos_token": True,
        "add_eos_token": True,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("Hi")
    assert ids[0] == 1
    assert ids[-1] == 32007
    assert tokenizer.eos_token_ids == (32007,)


def test_special_tokens_in_text_only_where_allowed(load: Load) -> None:
    tokenizer = load("qwen2")
    text = "a<|im_end|>b"
    assert 151645 in tokenizer.encode(text)
    plain = tokenizer.encode(text, allow_special=False)
    assert not tokenizer.special_token_ids & set(plain)
    assert tokenizer.decode(plain) == text
    assert 151645 in tokenizer.encode(text), "the setting of one call does not stay"
    assert load("llama2/tokenizer.model").encode("</s>", False, allow_special=False) != [2]


def test_special_tokens_are_found_inside_of_a_prompt(load: Load) -> None:
    for name in ("llama2", "llama2/tokenizer.model"):
        tokenizer = load(name)
        ids = tokenizer.encode("<s>[INST] a [/INST] b</s><s>", add_special_tokens=False)
        assert [i for i in ids if i in tokenizer.special_token_ids] == [1, 2, 1]


def test_special_tokens_are_skipped_or_shown(load: Load) -> None:
    for name, special in (("llama3", "<|eot_id|>"), ("llama2", "</s>"), ("qwen2", "<|im_end|>")):
        tokenizer = load(name)
        special_id = tokenizer.token_to_id(special)
        assert special_id in tokenizer.special_token_ids
        ids = [*tokenizer.encode("Yes", add_special_tokens=False), special_id]
        assert tokenizer.decode(ids) == "Yes"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "Yes" + special


def test_added_tokens_of_the_config_replace_flags(load: Load) -> None:
    tokenizer = load("phi-3-mini")
    assert 2 not in tokenizer.special_token_ids  # "special": false in both files
    assert tokenizer.encode("<|user|>\nHi<|end|>\n") == [32010, 6324, 32007]  # rstrip removes the line breaks


def test_the_config_of_a_newer_model_over_the_same_vocabulary(
    tokenizers_folder: Path, tmp_path: Path
) -> None:
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(tokenizers_folder / "qwen2" / file, tmp_path)
    shutil.copy(tokenizers_folder / "qwen3" / "tokenizer_config.json", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("<think>\n</think>") == [151667, 198, 151668]
    assert tokenizer.decode([151667, 151645]) == "<think>"  # not special: shown
    assert tokenizer.vocab_size == 151669
    assert tokenizer.special.roles["eos_token"] == "<|im_end|>"
    assert "enable_thinking" in tokenizer.chat_templates["default"]


def test_gaps_in_the_ids_have_no_token(load: Load) -> None:
    tokenizer = load("tiktoken/cl100k_base.tiktoken")
    assert tokenizer.id_to_token(100256) is None
    assert tokenizer.token_bytes(100256) == b""
    assert tokenizer.token_bytes(10**9) == b""
    assert tokenizer.token_bytes(-1) == b""
    assert tokenizer.id_to_token(100276) == "<|endofprompt|>"
    assert tokenizer.decode([100256, 9906, 10**9]) == "Hello"


def test_byte_tokens_have_their_byte(load: Load) -> None:
    llama2 = load("llama2/tokenizer.model")
    assert [llama2.token_bytes(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    for name in ("gpt2", "llama3", "tiktoken/o200k_base.tiktoken", "gpt-neox", "phi-2"):
        tokenizer = load(name)
        single = {tokenizer.token_bytes(i) for i in range(256 if name != "gpt-neox" else 300)}
        assert {bytes([byte]) for byte in range(0x21, 0x7F)} <= single


def test_added_tokens_of_spaces_decode_as_they_are(load: Load) -> None:
    for name in ("gpt-neox", "phi-2"):
        tokenizer = load(name)
        text = "a" + " " * 13 + "b"
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_newest_mistral_file_of_a_folder(load: Load) -> None:
    assert load("mistral").token_to_id("[SYSTEM_PROMPT]") == 16  # v7
    v3 = load("mistral/mistral_instruct_tokenizer_240323.model.v3")
    assert v3.encode("[INST] Hi[/INST]")[:2] == [1, 3]


def test_templates_from_files_and_lists(tokenizers_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tokenizers_folder / "llama2" / "tokenizer.model", tmp_path)
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(tmp_path).chat_templates == {"default": "D", "tool_use": "T"}
    (tmp_path / "chat_template.jinja").write_text("J")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert load_tokenizer(tmp_path).chat_templates == {"default": "J", "tool_use": "T", "rag": "R"}


def test_lone_surrogates_are_refused(load: Load) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        load("llama2/tokenizer.model").encode("a\ud800b")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer.*tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ModelLoadError, match="There is no"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize("keep", [0, 10, 1000, 100_000])
def test_a_truncated_sentencepiece_file(keep: int, tokenizers_folder: Path, tmp_path: Path) -> None:
    data = (tokenizers_folder / "llama2" / "tokenizer.model").read_bytes()
    (tmp_path / "tokenizer.model").write_bytes(data[:keep])
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model"):
        load_tokenizer(tmp_path)


def test_an_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ModelLoadError, match="git lfs pull"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {}}'])
def test_a_broken_tokenizer_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_broken_config(tokenizers_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tokenizers_folder / "llama2" / "tokenizer.model", tmp_path)
    wrong = ["{", "[]", '{"added_tokens_decoder": [1]}', '{"added_tokens_decoder": {"x": {"content": "a"}}}']
    wrong += [
        '{"added_tokens_decoder": {"1": {}}}',
        '{"additional_special_tokens": 3}',
        '{"chat_template": ["a"]}',
    ]
    for text in wrong:
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
            load_tokenizer(tmp_path)


def test_rank_files_that_are_not_known_or_damaged(tmp_path: Path) -> None:
    lines = [f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256)]
    path = tmp_path / "own.tiktoken"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ModelLoadError, match="256 ranks"):
        load_tokenizer(tmp_path)
    lines[7] = "???? 7"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ModelLoadError, match="line 8"):
        load_tokenizer(tmp_path)


def test_files_that_do_not_belong_together(tokenizers_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tokenizers_folder / "gpt2" / "vocab.json", tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\nno such merge\n")
    with pytest.raises(ModelLoadError, match=r"merges\.txt, line 2"):
        load_tokenizer(tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\nzzzzqqq qqqzzz\n")
    with pytest.raises(ModelLoadError, match=r"merges\.txt: the merges do not fit"):
        load_tokenizer(tmp_path)
    shutil.copy(tokenizers_folder / "gpt2" / "merges.txt", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "WhoKnows"}')
    with pytest.raises(ModelLoadError, match="WhoKnows"):
        load_tokenizer(tmp_path)


def test_a_space_before_every_text(tokenizers_folder: Path, tmp_path: Path) -> None:
    for file in ("vocab.json", "merges.txt"):
        shutil.copy(tokenizers_folder / "gpt2" / file, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"add_prefix_space": true}')
    with pytest.raises(UnsupportedModelError, match="add_prefix_space"):
        load_tokenizer(tmp_path)
    other = tmp_path / "sentencepiece"
    other.mkdir()
    shutil.copy(tokenizers_folder / "llama2" / "tokenizer.model", other)
    (other / "tokenizer_config.json").write_text('{"add_prefix_space": false}')
    tokenizer = load_tokenizer(other)
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("the", add_special_tokens=False)] == ["the"]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_an_added_token_at_the_wrong_id(tokenizers_folder: Path, tmp_path: Path) -> None:
    shutil.copy(tokenizers_folder / "phi-2" / "tokenizer.json", tmp_path)
    config = {"added_tokens_decoder": {"60000": {"content": "<|new|>", "special": True}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="60000"):
        load_tokenizer(tmp_path)


def test_a_decoder_that_is_no_map_of_tokens(tokenizers_folder: Path, tmp_path: Path) -> None:
    document = json.loads((tokenizers_folder / "phi-3-mini" / "tokenizer.json").read_text())
    document["decoder"] = {"type": "BPEDecoder", "suffix": "</w>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UnsupportedModelError, match="BPEDecoder"):
        load_tokenizer(tmp_path)
    document["decoder"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(UnsupportedModelError, match="no decoder"):
        load_tokenizer(tmp_path)

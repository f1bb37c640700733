"""The shipped models: present, small, loadable, and with the tokenizer that the project promises. No torch here."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tokenizer import CONTROL_TOKENS, RESERVED_TOKENS, VISIBLE_TOKENS

from quire.errors import ModelLoadError
from quire.families import spec_from_config
from quire.models.hub import QUILL_NAMES, quill_path
from quire.modelspec import weight_shapes
from quire.text.chat_template import ChatTemplate
from quire.text.load import load_tokenizer

MAX_PACKAGE_BYTES = 16_000_000
MAX_PARAMETERS = {"quill": 7_000_000, "quill-draft": 1_100_000}
TOKENIZER = load_tokenizer(quill_path("quill"))


def header(name: str) -> dict[str, dict[str, object]]:
    """The tensors that the safetensors file lists: name -> dtype, shape, data_offsets."""
    with (quill_path(name) / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        tensors: dict[str, dict[str, object]] = json.loads(file.read(length))
    tensors.pop("__metadata__", None)
    return tensors


def test_both_models_fit_the_package_budget() -> None:
    sizes = [path.stat().st_size for name in QUILL_NAMES for path in quill_path(name).iterdir()]
    assert sum(sizes) <= MAX_PACKAGE_BYTES


@pytest.mark.parametrize("name", QUILL_NAMES)
def test_config_and_weights_agree(name: str) -> None:
    spec = spec_from_config(json.loads((quill_path(name) / "config.json").read_text()))
    assert spec.architecture == "LlamaForCausalLM"
    assert (spec.vocab_size, spec.max_position_embeddings, spec.dtype) == (4096, 8192, "bfloat16")
    assert spec.tie_word_embeddings
    assert spec.num_params <= MAX_PARAMETERS[name]
    tensors = header(name)
    assert {tensor["dtype"] for tensor in tensors.values()} == {"BF16"}
    shapes = sorted(tuple(tensor["shape"]) for tensor in tensors.values())  # type: ignore[arg-type]
    assert len(tensors) == 2 + 9 * spec.num_layers
    assert (
        sum(_size(shape) for shape in shapes)
        == spec.num_params
        == sum(map(_size, weight_shapes(spec).values()))
    )


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def test_the_draft_has_the_same_tokenizer() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (quill_path("quill") / file).read_bytes() == (quill_path("quill-draft") / file).read_bytes()


def test_special_tokens_are_single_ids_in_order() -> None:
    tokens = (*CONTROL_TOKENS, *VISIBLE_TOKENS, *RESERVED_TOKENS)
    assert len(tokens) == 25
    assert [TOKENIZER.token_to_id(token) for token in tokens] == list(range(25))
    assert TOKENIZER.encode("".join(tokens), add_special_tokens=False) == list(range(25))
    assert TOKENIZER.id_to_token(4095) is not None
    assert TOKENIZER.id_to_token(4096) is None


def test_only_reasoning_and_tool_marks_survive_skipping() -> None:
    assert TOKENIZER.decode(range(25), skip_special_tokens=True) == "".join(VISIBLE_TOKENS)


def test_a_text_opens_with_bos() -> None:
    assert TOKENIZER.encode("It was")[0] == TOKENIZER.bos_token_id == 0
    assert TOKENIZER.eos_token_ids[0] == 1


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80))
def test_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False, allow_special=False)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_chat_template() -> None:
    template = ChatTemplate.of(TOKENIZER, clock=lambda: datetime(2026, 1, 1))
    turns = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Good day."), ("user", "Why?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    prompt = template.render(messages, add_generation_prompt=True)
    assert prompt == (
        "<|bos|><|system|>Be brief.<|end|><|user|>Hello<|end|><|assistant|>Good day.<|end|>"
        "<|user|>Why?<|end|><|assistant|>"
    )


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="did you mean 'quill'"):
        quill_path("quil")


def test_lookup_does_not_import_torch() -> None:
    code = "import sys, quire.models.hub; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
    )

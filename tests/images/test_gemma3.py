"""A tiny Gemma 3, against transformers, and against itself however a prompt is computed: images see both ways."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="the extra `images` is not installed")

import torch
from PIL import Image
from tests.images import tiny_gemma3
from tests.images.test_seeing import (
    CHATS,
    GREEDY,
    NEW_TOKENS,
    SEEDS,
    TOLERANCE,
    TURN,
    answer,
    answers,
    chat,
    load,
)
from tests.images.tiny_gemma3 import EDGE, NUM_TOKENS
from tests.images.tiny_vlm import make_image
from transformers import AutoTokenizer
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from quire import LLM
from quire.errors import ConfigError, RequestError
from quire.images.gemma3 import BEGIN, END, IMAGE, prepare
from quire.models.checkpoint import describe
from quire.models.vision.pixels import pixel_values

# Images next to each other, and at the very end, where only the template's text follows.
LAST = chat("Compare", make_image(30, 60, 5), make_image(31, 60, 6))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vlm")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return tiny_gemma3.make_model(folder)


@pytest.fixture(scope="module")
def llm(folder: Path, oracle: Any) -> Iterator[LLM]:
    with load(folder) as loaded:
        yield loaded


def expected(folder: Path, model: Any, messages: Sequence[dict[str, Any]]) -> tuple[list[int], torch.Tensor]:
    """Return greedy tokens of transformers, and the log-probabilities that each was chosen from."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = [
        Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))
        for part in messages[0]["content"]
        if part["type"] == "image_url"
    ]
    plain = [{"type": "image"} if part["type"] == "image_url" else part for part in messages[0]["content"]]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": plain}], tokenize=False, add_generation_prompt=True
    )
    text = text.replace(BEGIN, f"\n\n{BEGIN}{IMAGE * NUM_TOKENS}{END}\n\n")
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    inputs: dict[str, Any] = {}
    if images:
        processed = Gemma3ImageProcessorPil.from_pretrained(folder)(images, return_tensors="pt")
        inputs = {
            "pixel_values": processed["pixel_values"],
            "token_type_ids": (ids == model.config.image_token_id).int(),
        }
    with torch.no_grad():
        output = model.generate(
            input_ids=ids, **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
            output_logits=True, return_dict_in_generate=True, eos_token_id=None,
        )  # fmt: skip
    logits = torch.stack([row[0] for row in output.logits])
    return output.sequences[0, ids.shape[1] :].tolist(), torch.log_softmax(logits.float(), -1)


@pytest.mark.parametrize("name", [*CHATS, "last"])
def test_answer_equals_that_of_transformers(name: str, folder: Path, oracle: Any, llm: LLM) -> None:
    messages = {**CHATS, "last": LAST}[name]
    token_ids, rows = expected(folder, oracle, messages)
    mine, logprobs = answer(llm, messages)
    assert mine == token_ids
    assert len(set(mine)) > 3, "greedy text that repeats itself proves little"
    for entry, row in zip(logprobs, rows, strict=True):
        assert max(abs(item.logprob - float(row[token_id])) for token_id, item in entry.items()) <= TOLERANCE


def test_pixels_equal_those_of_transformers(folder: Path, oracle: Any) -> None:
    vision = describe(folder).spec.vision
    assert vision is not None
    processor = Gemma3ImageProcessorPil.from_pretrained(folder)
    for size in [(EDGE, EDGE), (100, 37), (7, 5), (1, 1), (300, 10)]:
        image = make_image(*size)
        (piece,) = prepare(image, vision).pieces
        theirs = processor([image], return_tensors="np")["pixel_values"][0]
        pixels = np.frombuffer(piece.data, np.uint8).reshape(3, EDGE, EDGE)
        mine = np.stack([pixel_values(vision)[channel][pixels[channel]] for channel in range(3)])
        np.testing.assert_array_equal(mine, theirs)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[Any]:
    """Each conversation by itself, whole, and nothing from the cache."""
    found = []
    for messages, params in zip((CHATS["one"], CHATS["two"], TURN), SEEDS, strict=True):
        llm.reset_prefix_cache()
        (output,) = llm.chat(messages, params, use_tqdm=False)
        assert output.num_cached_tokens == 0
        found.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "batched": {"enable_prefix_caching": False},
    "chunks of 19": {"max_num_batched_tokens": NUM_TOKENS + 3, "max_num_seqs": 3},
    "chunks of 23, blocks of 4": {
        "max_num_batched_tokens": NUM_TOKENS + 7, "max_num_seqs": 3, "block_size": 4, "num_kv_blocks": 480,
    },
    "preempted": {"max_model_len": 160, "num_kv_blocks": 24, "max_num_seqs": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", list(SETTINGS))
def test_answers_have_the_same_bits_however_computed(name: str, folder: Path, alone: list[Any]) -> None:
    with load(folder, **SETTINGS[name]) as other:
        chats = [CHATS["one"], CHATS["two"], TURN]
        assert answers(other, chats) == alone
        assert answers(other, chats) == alone  # from the cache, where there is one
        preemptions = sum(each.value for each in other.get_metrics() if "preempt" in each.name)
        assert (preemptions > 0) == (name == "preempted")


def test_prefix_hit_may_end_in_a_span_and_after_it(folder: Path, llm: LLM, alone: list[Any]) -> None:
    wide = make_image(90, 20, 2)
    first, second = (chat("Look now", wide, words) for words in ("or not?", "then"))
    llm.reset_prefix_cache()
    (fresh,) = llm.chat(second, SEEDS[1], use_tqdm=False)
    with load(folder, block_size=4, num_kv_blocks=480) as other:
        image = other.model.vision.image_token_id if other.model.vision is not None else -1
        # The same image first, and other words after it, which begin in the block that the image ends in.
        other.chat(first, GREEDY, use_tqdm=False)
        (output,) = other.chat(second, SEEDS[1], use_tqdm=False)
        assert output.outputs[0].logprobs == fresh.outputs[0].logprobs
        begin = list(output.prompt_token_ids or ()).index(image)
        assert begin < output.num_cached_tokens < begin + NUM_TOKENS
        other.chat(CHATS["two"], GREEDY, use_tqdm=False)
        (output,) = other.chat(TURN, SEEDS[2], use_tqdm=False)
        assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == alone[2]
        assert output.num_cached_tokens > len(output.prompt_token_ids or ()) // 2


def test_budget_that_no_image_fits_is_refused_at_the_start(folder: Path, oracle: Any) -> None:
    with pytest.raises(ConfigError, match="18 is too small: the 16 tokens of an image") as error:
        load(folder, max_num_batched_tokens=NUM_TOKENS + 2, max_num_seqs=3)
    assert error.value.param == "max_num_batched_tokens"


def test_marks_and_tokens_of_images_in_a_text_are_refused(llm: LLM) -> None:
    for text in (f"An {BEGIN} of nothing", f"An {IMAGE} of nothing"):
        with pytest.raises(RequestError, match="placeholder"):
            llm.chat(chat(text), GREEDY, use_tqdm=False)
        with pytest.raises(RequestError, match="placeholder"):
            llm.chat(chat(text, make_image(9, 9)), GREEDY, use_tqdm=False)

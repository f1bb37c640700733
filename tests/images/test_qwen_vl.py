"""Tiny Qwen2.5-VL and Qwen3-VL, against transformers, and against themselves however a prompt is computed."""

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
from tests.images import tiny_qwen_vl
from tests.images.test_seeing import (
    CHATS,
    GREEDY,
    NEW_TOKENS,
    SEEDS,
    SETTINGS,
    TOLERANCE,
    TURN,
    answer,
    answers,
    chat,
    load,
)
from tests.images.tiny_qwen_vl import MAX_PIXELS, MEAN, MIN_PIXELS, STD
from tests.images.tiny_vlm import make_image
from transformers import AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire import LLM
from quire.images.qwen_vl import prepare
from quire.models.checkpoint import describe
from quire.models.vision.pixels import pixel_values

KINDS = ("Qwen3VL", "Qwen2_5_VL")


class Made:
    """A model's folder, and transformers' model of it."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind = folder, kind
        self.oracle = tiny_qwen_vl.make_model(folder, kind)


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("vlm"), request.param)


@pytest.fixture(scope="module")
def llm(made: Made) -> Iterator[LLM]:
    with load(made.folder) as loaded:
        yield loaded


def processor() -> Any:
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}, image_mean=MEAN, image_std=STD,
        patch_size=tiny_qwen_vl.PATCH, merge_size=tiny_qwen_vl.MERGE, temporal_patch_size=2,
    )  # fmt: skip


def expected(made: Made, messages: Sequence[dict[str, Any]]) -> tuple[list[int], torch.Tensor]:
    """Return greedy tokens of transformers, and the log-probabilities that each was chosen from."""
    tokenizer = AutoTokenizer.from_pretrained(made.folder)
    images = [
        Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))
        for part in messages[0]["content"]
        if part["type"] == "image_url"
    ]
    plain = [{"type": "image"} if part["type"] == "image_url" else part for part in messages[0]["content"]]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": plain}], tokenize=False, add_generation_prompt=True
    )
    inputs: dict[str, Any] = {}
    if images:
        inputs = dict(processor()(images, return_tensors="pt"))
        for _, rows, columns in inputs["image_grid_thw"].tolist():
            text = text.replace("<|image_pad|>", "<>" * (rows * columns // tiny_qwen_vl.MERGE**2), 1)
        text = text.replace("<>", "<|image_pad|>")
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    if images:
        inputs["mm_token_type_ids"] = (ids == made.oracle.config.image_token_id).int()
    with torch.no_grad():
        output = made.oracle.generate(
            input_ids=ids, **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
            output_logits=True, return_dict_in_generate=True, eos_token_id=None,
        )  # fmt: skip
    logits = torch.stack([row[0] for row in output.logits])
    return output.sequences[0, ids.shape[1] :].tolist(), torch.log_softmax(logits.float(), -1)


@pytest.mark.parametrize("name", list(CHATS))
def test_answer_equals_that_of_transformers(name: str, made: Made, llm: LLM) -> None:
    token_ids, rows = expected(made, CHATS[name])
    mine, logprobs = answer(llm, CHATS[name])
    assert mine == token_ids
    assert len(set(mine)) > 4, "greedy text that repeats itself proves little"
    for entry, row in zip(logprobs, rows, strict=True):
        assert max(abs(item.logprob - float(row[token_id])) for token_id, item in entry.items()) <= TOLERANCE


@pytest.mark.parametrize("size", [(48, 48), (100, 37), (7, 5), (1, 1), (300, 10), (9, 8), (333, 250)])
def test_pixels_equal_those_of_transformers(size: tuple[int, int], made: Made) -> None:
    vision = describe(made.folder).spec.vision
    assert vision is not None
    image = make_image(*size)
    (piece,) = prepare(image, vision).pieces
    theirs = processor()([image], return_tensors="np")
    rows, columns = theirs["image_grid_thw"][0, 1:]
    assert piece.grid == (rows * vision.patch_size, columns * vision.patch_size)
    pixels = np.frombuffer(piece.data, np.uint8).reshape(3, *piece.grid)
    mine = np.stack([pixel_values(vision)[channel][pixels[channel]] for channel in range(3)])
    merge, patch = vision.merge, vision.patch_size
    cut = theirs["pixel_values"].reshape(rows // merge, columns // merge, merge, merge, 3, 2, patch, patch)
    for frame in range(2):
        whole = cut[:, :, :, :, :, frame].transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, *piece.grid)
        np.testing.assert_array_equal(mine, whole)


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


@pytest.mark.parametrize("name", list(SETTINGS))
def test_answers_have_the_same_bits_however_computed(name: str, made: Made, alone: list[Any]) -> None:
    settings = {"preempted": {"max_model_len": 192, "num_kv_blocks": 14, "max_num_seqs": 3}}.get(
        name, SETTINGS[name]
    )
    with load(made.folder, **settings) as other:
        chats = [CHATS["one"], CHATS["two"], TURN]
        assert answers(other, chats) == alone
        assert answers(other, chats) == alone  # from the cache, where there is one
        preemptions = sum(each.value for each in other.get_metrics() if "preempt" in each.name)
        assert (preemptions > 0) == (name == "preempted")


def test_prefix_hit_after_images_gives_same_bits(made: Made, alone: list[Any]) -> None:
    with load(made.folder, block_size=4, num_kv_blocks=480) as other:
        # After the first message, whose images are in the cache, and then all of it.
        for messages in (CHATS["two"], TURN):
            other.chat(messages, GREEDY, use_tqdm=False)
            (output,) = other.chat(TURN, SEEDS[2], use_tqdm=False)
            assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == alone[2]
            assert output.num_cached_tokens > len(output.prompt_token_ids or ()) // 2


def test_image_of_same_size_is_not_taken_for_another(made: Made, llm: LLM) -> None:
    first, second = (chat(make_image(64, 50, seed), "What is this?") for seed in (1, 4))
    llm.reset_prefix_cache()
    llm.chat(first, GREEDY, use_tqdm=False)
    (after,) = llm.chat(second, GREEDY, use_tqdm=False)
    llm.reset_prefix_cache()
    (fresh,) = llm.chat(second, GREEDY, use_tqdm=False)
    assert after.outputs[0].logprobs == fresh.outputs[0].logprobs

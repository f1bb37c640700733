"""A tiny model that sees, against transformers, and against itself: alone, in a batch, in chunks, from the cache."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="the extra `images` is not installed")

import torch
from PIL import Image
from tests.images.tiny_vlm import CONTEXT, LONGEST, TILE, make_image, make_model
from transformers import AutoTokenizer
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from quire import LLM, SamplingParams
from quire.images.idefics3 import FAKE, GLOBAL, IMAGE

TOLERANCE = 2e-4
NEW_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, logprobs=5, ignore_eos=True)


def url_of(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def chat(*parts: str | Image.Image) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url_of(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


CAT, WIDE, SMALL = make_image(64, 50, 1), make_image(90, 20, 2), make_image(12, 9, 3)
CHATS = {
    "none": chat("What is the capital of France?"),
    "one": chat(CAT, "What is this?"),
    "two": chat("First", WIDE, "then", SMALL, "which is larger?"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vlm")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return make_model(folder)


def load(folder: Path, **settings: Any) -> LLM:
    values: dict[str, Any] = {"dtype": "float32", "max_model_len": CONTEXT, "num_kv_blocks": 160, "seed": 0}
    return LLM(str(folder), **(values | settings))


@pytest.fixture(scope="module")
def llm(folder: Path, oracle: Any) -> Iterator[LLM]:
    with load(folder) as made:
        yield made


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
    inputs: dict[str, Any] = {}
    if images:
        processed = SmolVLMImageProcessorPil.from_pretrained(folder)(
            [images], return_tensors="pt", return_row_col_info=True
        )
        rows, columns = processed.pop("rows")[0], processed.pop("cols")[0]
        assert processed["pixel_values"].shape[-1] == TILE <= LONGEST
        for row, column in zip(rows, columns, strict=True):
            text = text.replace(IMAGE, shown(row, column).replace(IMAGE, "<>"), 1)
        text = text.replace("<>", IMAGE)
        inputs = dict(processed)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        output = model.generate(
            input_ids=ids, **inputs, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False,
            output_logits=True, return_dict_in_generate=True, eos_token_id=None,
        )  # fmt: skip
    logits = torch.stack([row[0] for row in output.logits])
    return output.sequences[0, ids.shape[1] :].tolist(), torch.log_softmax(logits.float(), -1)


def shown(rows: int, columns: int) -> str:
    """Return the text of an image as transformers' processor writes it."""
    image = IMAGE * 4
    if not rows:
        return f"{FAKE}{GLOBAL}{image}{FAKE}"
    lines = [
        "".join(f"{FAKE}<row_{row + 1}_col_{column + 1}>{image}" for column in range(columns)) + "\n"
        for row in range(rows)
    ]
    return "".join(lines) + f"\n{FAKE}{GLOBAL}{image}{FAKE}"


def answer(llm: LLM, messages: list[dict[str, Any]]) -> tuple[list[int], list[Any]]:
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids), output.outputs[0].logprobs or []


@pytest.mark.parametrize("name", list(CHATS))
def test_answer_equals_that_of_transformers(name: str, folder: Path, oracle: Any, llm: LLM) -> None:
    token_ids, rows = expected(folder, oracle, CHATS[name])
    mine, logprobs = answer(llm, CHATS[name])
    assert mine == token_ids
    assert len(set(mine)) > 4, "greedy text that repeats itself proves little"
    for entry, row in zip(logprobs, rows, strict=True):
        assert max(abs(item.logprob - float(row[token_id])) for token_id, item in entry.items()) <= TOLERANCE


def test_text_that_is_no_part_is_not_dropped_by_template(llm: LLM) -> None:
    """SmolVLM's template writes parts alone."""
    texts = ("Who?", [{"type": "text", "text": "Who?"}])
    outputs = llm.chat([[{"role": "user", "content": text}] for text in texts], GREEDY, use_tqdm=False)
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids
    assert len(outputs[0].prompt_token_ids or ()) > len("User: Who?Assistant:")


def test_idefics3_with_a_tied_head_equals_transformers(tmp_path: Path) -> None:
    model = make_model(tmp_path, "Idefics3", tied=True)
    with load(tmp_path) as other:
        assert answer(other, CHATS["one"])[0] == expected(tmp_path, model, CHATS["one"])[0]


SEEDS = [
    SamplingParams(temperature=1.0, seed=seed, max_tokens=NEW_TOKENS, logprobs=2, ignore_eos=True)
    for seed in (1, 2, 3)
]
TURN = [*CHATS["two"], {"role": "assistant", "content": "The first."}, {"role": "user", "content": "Sure?"}]


def answers(llm: LLM, chats: Sequence[list[dict[str, Any]]]) -> list[Any]:
    """Return tokens and log-probabilities of each conversation, run together."""
    outputs = llm.chat(chats, SEEDS[: len(chats)], use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


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
    "chunks of 7": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "chunks of 16, blocks of 4": {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 3,
        "block_size": 4,
        "num_kv_blocks": 480,
    },
    "preempted": {"max_model_len": 320, "num_kv_blocks": 21, "max_num_seqs": 3},
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_answers_have_the_same_bits_however_computed(name: str, folder: Path, alone: list[Any]) -> None:
    with load(folder, **SETTINGS[name]) as other:
        chats = [CHATS["one"], CHATS["two"], TURN]
        assert answers(other, chats) == alone
        assert answers(other, chats) == alone  # from the cache, where there is one
        preemptions = sum(each.value for each in other.get_metrics() if "preempt" in each.name)
        assert (preemptions > 0) == (name == "preempted")


def test_prefix_hit_may_end_in_a_span_and_after_it(folder: Path, alone: list[Any]) -> None:
    with load(folder, block_size=4, num_kv_blocks=480) as other:
        other.chat(CHATS["two"], GREEDY, use_tqdm=False)
        (output,) = other.chat(TURN, SEEDS[2], use_tqdm=False)
        assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == alone[2]
        ids = output.prompt_token_ids
        assert ids is not None
        assert output.num_cached_tokens > len(ids) // 2
        # The first message up to the middle of the first tile of its first image.
        image = other.model.vision.image_token_id if other.model.vision is not None else -1
        inside = list(ids).index(image) + 2
        assert inside < output.num_cached_tokens


def test_image_of_same_size_is_not_taken_for_another(folder: Path, llm: LLM) -> None:
    first, second = (chat(make_image(64, 50, seed), "What is this?") for seed in (1, 4))
    llm.reset_prefix_cache()
    (before,) = llm.chat(first, GREEDY, use_tqdm=False)
    (after,) = llm.chat(second, GREEDY, use_tqdm=False)
    llm.reset_prefix_cache()
    (fresh,) = llm.chat(second, GREEDY, use_tqdm=False)
    assert after.prompt_token_ids == llm.chat(first, GREEDY, use_tqdm=False)[0].prompt_token_ids
    assert after.num_cached_tokens < list(after.prompt_token_ids or ()).index(259)
    assert after.outputs[0].logprobs == fresh.outputs[0].logprobs
    assert after.outputs[0].logprobs != before.outputs[0].logprobs

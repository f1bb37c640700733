"""Limits of a request: the one table, its page, and what a request beyond it gets."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from tests.api.asgi_client import Api, error_of
from tests.api.fake_frontend import FakeFrontend
from tests.faults.hostile import ATTACKS, words

from quire.engine.large_body import LargeBodies
from quire.engine.large_input import LongTexts
from quire.errors import RequestError, clip
from quire.http import limits
from quire.http.held_bytes import LARGE, MESSAGES, SMALL
from quire.http.limits import FIELDS, check_fields, check_whole
from quire.models.hub import quill_path
from quire.text.load import load_tokenizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "security.md"
WHOLE = {
    "fields at the top of a body": limits.BODY_FIELDS,
    "lists and objects in a body": limits.BODY_CONTAINERS,
    "texts, numbers and names in a body, lists of token ids apart": limits.BODY_VALUES,
    "token ids in one list": limits.LIST_IDS,
    "characters of a text that the context does not bound": limits.TEXT_CHARACTERS,
    "bytes of all large bodies that wait to be parsed": limits.WAITING_BYTES,
    "of all bodies over 1 MiB that wait": LARGE.max_bytes,
    "of all other bodies that wait": SMALL.max_bytes,
    "of all parts of WebSocket messages": MESSAGES.max_bytes,
    "parts of a form": limits.FORM_PARTS,
    "bytes in the headers of one part": limits.FORM_HEADER_BYTES,
    "bytes of a form's `Content-Type`": limits.CONTENT_TYPE_BYTES,
    "bytes of a line of a batch": limits.BATCH_LINE_BYTES,
}


def number(cell: str) -> int | None:
    return int(cell.replace(",", "")) if cell.strip() else None


def test_page_prints_the_table() -> None:
    page = PAGE.read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| ([\d,]*) ?\| ([\d,]*) ?\|$", page, re.MULTILINE)
    assert {name: (number(most), number(chars)) for name, most, chars in rows} == FIELDS
    whole = dict(re.findall(r"^\| ([^|]+) \| ([\d,]+) \|$", page, re.MULTILINE))
    assert {name: number(most) for name, most in whole.items()} == WHOLE


def values_of(field: limits.Limit, more: int) -> list[Any]:
    """Values that are as large as the limit, or beyond it by ``more``."""
    values: list[Any] = []
    if field.elements is not None:
        values.append(["x"] * (field.elements + more))
    if field.characters is not None:
        text = "x" * (field.characters + more)
        values.append(text if field.elements is None else [text])
    return values


@pytest.mark.parametrize("name", [name for name in FIELDS if "." not in name])
def test_a_field_may_be_as_large_as_its_limit(name: str) -> None:
    for value in values_of(FIELDS[name], 0):
        check_fields({name: value})
    for value in values_of(FIELDS[name], 1):
        with pytest.raises(RequestError, match=rf"{name} has \d+ \w+: at most \d+ are allowed") as refused:
            check_fields({name: value})
        assert refused.value.param == name
        assert refused.value.code == "limit_exceeded"


def test_nested_field_and_top_are_bounded() -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.choice has 8193 elements"):
        check_fields({"structured_outputs": {"choice": ["x"] * 8193}})
    with pytest.raises(RequestError, match="The body has 257 fields"):
        check_fields({f"k{i}": 1 for i in range(257)})
    check_fields({"prompt": [1] * 100_000})  # token ids: the context bounds them


def test_whole_body_is_bounded() -> None:
    with pytest.raises(RequestError, match="lists and objects"):
        check_whole({"x": [[]] * 65_537}, 10)
    with pytest.raises(RequestError, match="values"):
        check_whole({"x": [0] * 262_145}, 10)
    with pytest.raises(RequestError, match="A text of 'x' has 11 characters") as refused:
        check_whole({"x": [{"y": "a" * 11}]}, 10)
    assert refused.value.param == "x"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "hi", "stop": ["s"] * 65}, "stop"),
        ("/v1/completions", {"prompt": "hi", "bad_words": ["s"] * 513}, "bad_words"),
        ("/v1/completions", {"prompt": "hi", "logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias"),
        ("/detokenize", {"tokens": [1] * 262_145}, "tokens"),
        ("/v1/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
        ("/v1/messages", {"messages": [], "max_tokens": 1, "stop_sequences": ["a" * 4097]}, None),
    ],
)
def test_refusal_names_field_size_and_limit(path: str, fields: dict[str, Any], param: str | None) -> None:
    answer = Api().post(path, fields)
    assert answer.status_code == 400
    if param is not None:
        error = error_of(answer, 400)
        assert error["param"] == param
        assert error["code"] == "limit_exceeded"
    assert re.search(r"has \d+ \w+: at most \d+ are allowed", answer.text)


def test_large_body_is_parsed_in_the_helper_and_served() -> None:
    """A body of many values that are within the limits: the same answer as a small one."""
    api = Api(FakeFrontend(max_model_len=100_000))
    ids = [i % 200 for i in range(30_000)]
    assert api.post("/v1/completions", {"prompt": ids, "max_tokens": 4}).status_code == 200
    assert list(api.frontend.submitted[-1].prompt) == ids
    assert isinstance(api.frontend.submitted[-1].prompt, array)
    two = api.post("/v1/completions", {"prompt": [ids, "hi"], "max_tokens": 4})
    assert two.status_code == 200
    assert [len(s.prompt) for s in api.frontend.submitted[-2:]] == [30_000, 2]
    error = error_of(api.post("/v1/completions", {"prompt": [*ids, "x"]}), 400)
    assert error["param"] == "prompt[30000]"
    error = error_of(api.post("/v1/completions", {"prompt": [*ids, -1], "temprature": 1}), 400)
    assert error["code"] == "unknown_parameter"


@pytest.mark.parametrize("name", ["nested_lists_31mb", "stop_1m"])
def test_hostile_body_is_refused_without_holding_the_loop(name: str) -> None:
    _, _, body = ATTACKS[name]()
    gc.collect()
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            start_s = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - start_s)
            await asyncio.sleep(0.001)

    async def go() -> Any:
        bodies = LargeBodies()
        watching = asyncio.create_task(watch())
        try:
            pieces = [body[i : i + 65_536] for i in range(0, len(body), 65_536)]
            await asyncio.sleep(0.01)
            return await bodies.decode(pieces)
        finally:
            watching.cancel()
            bodies.close()

    with pytest.raises(RequestError):
        asyncio.run(go())
    assert longest < 0.5  # CPU seconds of this thread in one go; several before


def test_text_that_cannot_fit_is_refused_at_once() -> None:
    tokenizer = load_tokenizer(quill_path("quill"))
    assert tokenizer.min_tokens(10**6) > 60_000
    for text in ("a" * 5000, words(5000), "\n" * 500, "é漢🙂" * 200, "<|end|>" * 50):
        assert len(tokenizer.encode(text)) >= tokenizer.min_tokens(len(text))


@pytest.mark.parametrize("num_chars", [20_000, 300_000])
def test_long_text_has_the_tokens_of_a_short_one(num_chars: int) -> None:
    """On a thread, and in the helper process."""
    tokenizer = load_tokenizer(quill_path("quill"))
    text = words(num_chars) + "é漢🙂"

    async def go() -> list[list[int]]:
        texts = LongTexts(tokenizer)
        try:
            return [list(await texts.encode(text, add_special_tokens=special)) for special in (True, False)]
        finally:
            texts.close()

    assert asyncio.run(go()) == [
        tokenizer._backend.encode(text, add_special_tokens=s).ids for s in (True, False)
    ]


def test_cancelled_text_ends_its_helper() -> None:
    tokenizer = load_tokenizer(quill_path("quill"))

    async def go() -> None:
        texts = LongTexts(tokenizer)
        try:
            await texts.encode(words(300_000), add_special_tokens=True)  # the helper is started
            slow = asyncio.create_task(texts.encode("ab " * 1_300_000, add_special_tokens=True))
            await asyncio.sleep(0.3)
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
            assert len(await texts.encode("hi " * 90_000, add_special_tokens=True)) > 90_000
        finally:
            texts.close()

    asyncio.run(go())


def test_clip_of_a_large_value_is_cheap() -> None:
    value = {"a": ["x" * 10**7] * 10, "b": [[i] for i in range(10**6)]}
    start_s = time.process_time()
    assert len(clip(value)) == 80
    assert time.process_time() - start_s < 0.2  # all of it takes seconds
    for small in ({"a": [1, "b", None]}, "text", 5, [[["deep"]]], {"x": {"y": 1.5}}):
        assert clip(small) == repr(small)
    assert json.dumps(value["b"][0]) == "[0]"

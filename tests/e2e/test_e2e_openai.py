"""OpenAI's own client against a live server: the same words whole, streamed, alone and among others."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest
from tests.e2e.asking import PROMPT, ask
from tests.e2e.live import LiveServer

from quire.models.hub import quill_path
from quire.text.token_text import BYTE_OF_CHAR

BOTH = pytest.mark.parametrize("chat", [False, True], ids=["completions", "chat"])
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"seed": 5, "temperature": 1.0},
    "n": {"seed": 6, "n": 4, "temperature": 1.0},
    "penalties": {"seed": 7, "presence_penalty": 1.0, "frequency_penalty": 0.5, "top_k": 20, "min_p": 0.02},
    "stop": {"seed": 8, "stop": ["e", "he"], "min_tokens": 5},
    "stop kept": {"seed": 9, "stop": [" t", "the", ". "], "include_stop_str_in_output": True},
}


@BOTH
@pytest.mark.parametrize("case", CASES, ids=list(CASES))
def test_stream_equals_whole(client: openai.OpenAI, chat: bool, case: str) -> None:
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    fields = {"max_tokens": 16, **logprobs, **CASES[case]}
    whole = ask(client, chat=chat, stream=False, **fields)
    streamed = ask(client, chat=chat, stream=True, **fields)
    assert len(whole) == fields.get("n", 1)
    for one in whole + streamed:
        one.usage.prompt_tokens_details.cached_tokens = 0  # the second time more is there
    assert streamed == whole, case
    assert all(a.finish_reason in ("stop", "length") for a in whole)
    assert whole[0].usage.completion_tokens == sum(len(a.token_ids) for a in whole)
    assert all(len(a.logprobs) == len(a.token_ids) for a in whole)


@BOTH
def test_n_texts_differ_and_each_equals_its_index_asked_alone(client: openai.OpenAI, chat: bool) -> None:
    fields: dict[str, Any] = {"seed": 11, "temperature": 1.0, "max_tokens": 16}
    four = [a.text for a in ask(client, chat=chat, stream=False, n=4, **fields)]
    assert len(set(four)) == 4, four
    # Choice i of any n is the same: its random numbers are a function of (seed, i, position).
    for n in (1, 2, 3):
        assert [a.text for a in ask(client, chat=chat, stream=n == 2, n=n, **fields)] == four[:n]


def test_seeds(client: openai.OpenAI) -> None:
    def text(**fields: Any) -> str:
        return ask(client, chat=False, stream=False, temperature=1.0, max_tokens=16, **fields)[0].text

    assert text(seed=1) == text(seed=1)
    assert len({text(seed=i) for i in range(4)}) == 4
    assert (
        len({text() for _ in range(8)}) > 1
    )  # each request without a seed draws one; the fake model's may be empty


@BOTH
def test_a_stop_string_never_shows(client: openai.OpenAI, chat: bool) -> None:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    full = ask(client, chat=chat, stream=False, **fields)[0].text
    assert len(full) > 12, full
    for start, length in ((3, 5), (6, 2), (9, 1)):
        stop = full[start : start + length]
        expected = full[: full.index(stop)]
        for stream in (False, True):
            (got,) = ask(client, chat=chat, stream=stream, stop=stop, **fields)
            assert (got.text, got.finish_reason, got.stop_reason) == (expected, "stop", stop)
            (kept,) = ask(
                client, chat=chat, stream=stream, stop=stop, include_stop_str_in_output=True, **fields
            )
            assert kept.text == expected + stop
    never = ask(client, chat=chat, stream=True, stop=["\u0001never"], **fields)[0]
    assert (never.text, never.finish_reason) == (full, "length")


def test_utf8_split_over_tokens(client: openai.OpenAI) -> None:
    """Only byte tokens may be drawn: characters come in halves, and some never become whole."""
    char_of = {byte: char for char, byte in BYTE_OF_CHAR.items()}
    vocab = json.loads((quill_path("quill") / "tokenizer.json").read_text())["model"]["vocab"]
    byte_token = {b: vocab[char_of[b]] for b in (0xC3, 0xA9, 0xE2, 0x82, 0xAC)}
    # At this temperature any byte may follow any other.
    fields: dict[str, Any] = {
        "allowed_token_ids": list(byte_token.values()),
        "seed": 3,
        "max_tokens": 60,
        "temperature": 100.0,
    }
    whole = ask(client, chat=True, stream=False, logprobs=True, ignore_eos=True, **fields)[0]
    streamed = ask(client, chat=True, stream=True, logprobs=True, ignore_eos=True, **fields)[0]
    data = b"".join(bytes(entry.bytes) for entry in whole.logprobs)
    assert len(data) == 60
    assert set(data) <= set(byte_token)
    assert whole.text == streamed.text == data.decode("utf-8", "replace")
    assert "\ufffd" in whole.text  # some stay halves
    assert set(whole.text) - {"\ufffd"}, whole.text  # some become whole


@BOTH
def test_logprobs(client: openai.OpenAI, chat: bool, is_real: bool) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
    (answer,) = ask(client, chat=chat, stream=False, temperature=0, max_tokens=8, **fields)
    assert len(answer.logprobs) == len(answer.token_ids)
    for entry in answer.logprobs:
        token, logprob = (entry.token, entry.logprob) if chat else entry[:2]
        top = [(t.token, t.logprob) for t in entry.top_logprobs] if chat else list(entry[2].items())
        assert logprob <= 0
        assert 3 <= len(top) <= 3 + (not chat)  # completions: the drawn token is there in any case
        if is_real:
            assert top[0] == (token, logprob)  # greedy draws the most likely
            assert [p for _, p in top] == sorted((p for _, p in top), reverse=True)
    if is_real and not chat:
        pieces = [entry[0] for entry in answer.logprobs]
        assert "".join(pieces).removeprefix(" ") == answer.text.removeprefix(" ")
        begin = len(PROMPT)  # they count from its start, though it is not echoed
        offsets = [begin + len("".join(pieces[:i])) for i in range(len(pieces))]
        assert [entry[3] for entry in answer.logprobs] == offsets


def test_an_answer_goes_on_from_the_prompt(client: openai.OpenAI, is_real: bool) -> None:
    """The space of " named" after "girl" stays, so that prompt + text reads as one."""
    (answer,) = ask(client, chat=False, stream=False, temperature=0, max_tokens=8, logprobs=1)
    assert not is_real or answer.text == "".join(entry[0] for entry in answer.logprobs)


def test_usage_and_the_prefix_cache(client: openai.OpenAI) -> None:
    prompt = PROMPT + " fox" * 80
    for stream in (False, True):
        text = f"{stream} {prompt}"
        first, again = (
            ask(client, chat=False, stream=stream, prompt=text, max_tokens=4, temperature=0)[0]
            for _ in range(2)
        )
        assert first.token_ids == again.token_ids
        assert first.usage.prompt_tokens == again.usage.prompt_tokens > 80
        assert again.usage.prompt_tokens_details.cached_tokens >= 64
        assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens


def wait_until_idle(server: LiveServer) -> None:
    deadline = time.monotonic() + 60
    while server.metric("vllm:num_requests_running") or server.metric("vllm:kv_cache_usage_perc"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_leaving_a_stream_frees_its_blocks(client: openai.OpenAI, server: LiveServer) -> None:
    wait_until_idle(server)
    steps = server.metric("quire:steps_total")
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    )
    for _ in range(3):
        next(stream)
    stream.close()
    wait_until_idle(server)
    assert server.metric("quire:http_disconnects_total") >= 1
    # Far fewer than the 500 that were asked for; the socket's own buffers let the engine run ahead a little.
    assert server.metric("quire:steps_total") - steps < 250


def test_many_at_once_say_what_each_says_alone(client: openai.OpenAI, server: LiveServer) -> None:
    def fields(i: int) -> dict[str, Any]:
        return {
            "model": "tiny",
            "prompt": PROMPT[: 8 + i],
            "seed": i,
            "max_tokens": 4 + i,
            "temperature": i % 3 / 2,
        }

    async def crowd() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as many:
            answers = await asyncio.gather(*(many.completions.create(**fields(i)) for i in range(12)))
        return [a.choices[0].text for a in answers]

    together = asyncio.run(crowd())
    alone = [client.completions.create(**fields(i)).choices[0].text for i in range(12)]
    assert together == alone


def test_errors_as_the_client_sees_them(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt=[1] * 600, max_tokens=5)
    assert all(number in str(long.value) for number in ("600", "5", "512"))
    image: Any = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(openai.BadRequestError, match="text only"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": image}])


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_prompts_in_every_form(client: openai.OpenAI) -> None:
    ids = (
        client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=1, extra_body={"return_token_ids": True}
        )
        .choices[0]
        .prompt_token_ids
    )  # type: ignore[attr-defined]
    texts = [
        c.text
        for prompt in (PROMPT, ids, [PROMPT, PROMPT], [ids, ids])
        for c in client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=8).choices
    ]
    assert len(texts) == 6
    assert len(set(texts)) == 1


def test_the_default_of_max_tokens(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="a", extra_body={"ignore_eos": True})
    assert whole.usage.completion_tokens == 16  # type: ignore[union-attr]
    prompt = PROMPT * 32
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": prompt}], extra_body={"ignore_eos": True}
    )
    assert chat.usage.total_tokens == 512  # type: ignore[union-attr]  # the whole context
    assert chat.choices[0].finish_reason == "length"

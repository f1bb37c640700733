"""Scores of prompts from a live server with Quill, through OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.e2e.live import LiveServer

from quire.errors import ModelLoadError
from quire.models.hub import quill_path

TEXT = "Once upon a time, there was a little girl who lived by the sea with her mother and a small grey cat."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    try:
        quill_path("quill")
    except ModelLoadError as error:
        pytest.skip(str(error))
    log = tmp_path_factory.mktemp("scores") / "log"
    # Chunks of eight rows: every prompt here comes in several.
    command = ["-m", "quire.cli", "serve", "--port", "0", "--threads", "1", "--max-num-batched-tokens", "8"]
    with LiveServer(command, log) as live:
        yield live
        assert live.metric("quire:kv_blocks_free") + live.metric("quire:kv_blocks_idle") == live.metric(
            "quire:kv_blocks"
        )
        assert live.stop() == 0, live.log.read_text()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def test_echoed_logprobs_of_an_answer_are_those_it_was_given(client: openai.OpenAI) -> None:
    """The answer's tokens sent back as a prompt have the same log-probabilities, to the last bit."""
    asked: dict[str, Any] = {"model": "quill", "prompt": TEXT, "temperature": 0, "logprobs": 2}
    answer = client.completions.create(
        **asked, max_tokens=24, extra_body={"return_token_ids": True, "ignore_eos": True}
    ).choices[0]
    ids = answer.prompt_token_ids + answer.token_ids  # type: ignore[attr-defined]
    given = answer.logprobs
    assert given is not None
    for stream in (False, True):
        again: Any = client.completions.create(
            **{**asked, "prompt": ids, "max_tokens": 0, "stream": stream}, echo=True
        )
        parts = [c.choices[0].logprobs for c in again] if stream else [again.choices[0].logprobs]
        logprobs = [p for part in parts if part for p in part.token_logprobs]
        assert len(logprobs) == len(ids)
        assert logprobs[0] is None
        assert logprobs[-24:] == given.token_logprobs
        tops = [p for part in parts if part for p in part.top_logprobs]
        assert tops[-24:] == given.top_logprobs
    assert again is not None


def test_prompt_logprobs(client: openai.OpenAI) -> None:
    whole: Any = client.chat.completions.create(
        model="quill",
        messages=[{"role": "user", "content": TEXT}],
        max_tokens=4,
        extra_body={"prompt_logprobs": 3, "return_token_ids": True},
    )
    table = whole.prompt_logprobs
    ids = whole.prompt_token_ids
    assert table[0] is None
    for token_id, entries in zip(ids[1:], table[1:], strict=True):
        assert str(token_id) in entries
        assert 3 <= len(entries) <= 4
        ranked = sorted(entries.values(), key=lambda e: e["rank"])
        assert [e["logprob"] for e in ranked] == sorted((e["logprob"] for e in ranked), reverse=True)
    completion: Any = client.completions.create(
        model="quill", prompt=ids, max_tokens=1, extra_body={"prompt_logprobs": 3}
    )
    assert completion.choices[0].prompt_logprobs == table


def test_embeddings(client: openai.OpenAI) -> None:
    texts = [TEXT, "The sea was calm.", TEXT]
    for pooling in ("last", "mean"):
        extra = {"pooling": pooling}
        packed = client.embeddings.create(model="quill", input=texts, extra_body=extra)  # asks for base64
        plain = client.embeddings.create(
            model="quill", input=texts, encoding_format="float", extra_body=extra
        )
        vectors = [item.embedding for item in plain.data]
        assert [item.embedding for item in packed.data] == vectors
        assert vectors[0] == vectors[2] != vectors[1]
        assert sum(x * x for x in vectors[0]) == pytest.approx(1.0, abs=1e-5)
        for text, vector in zip(texts, vectors, strict=True):  # alone as among others
            (one,) = client.embeddings.create(model="quill", input=text, extra_body=extra).data
            assert one.embedding == vector
        (short,) = client.embeddings.create(model="quill", input=TEXT, dimensions=16, extra_body=extra).data
        part = sum(x * x for x in vectors[0][:16]) ** 0.5
        assert short.embedding == pytest.approx([x / part for x in vectors[0][:16]], abs=1e-6)
        assert plain.usage.prompt_tokens == plain.usage.total_tokens > 0
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="quill", input=TEXT, dimensions=100_000)
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize("scoring", ["likelihood", "yes_no"])
def test_rerank_and_score(client: openai.OpenAI, scoring: str) -> None:
    query = "The girl lived by the sea in a small house."
    documents = ["It was a cold day in the woods.", query, "The captain laughed."]
    body: dict[str, Any] = {"query": query, "documents": documents, "scoring": scoring}
    ranked: Any = client.post("/rerank", body=body, cast_to=dict)
    scores = {r["index"]: r["relevance_score"] for r in ranked["results"]}
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert all(0 < s < 1 for s in scores.values())
    if scoring == "likelihood":
        assert ranked["results"][0]["index"] == 1
    scored: Any = client.post(
        "/score", body={"text_1": query, "text_2": documents, "scoring": scoring}, cast_to=dict
    )
    assert [d["score"] for d in scored["data"]] == [scores[i] for i in range(3)]


def test_beams(client: openai.OpenAI) -> None:
    """The best of a wider search is at least as likely; the answers' scores fall; alone as among others."""
    asked: dict[str, Any] = {"model": "quill", "prompt": TEXT, "max_tokens": 12, "logprobs": 0}
    totals = []
    for width in (1, 2, 6):
        extra = {"use_beam_search": True, "best_of": width, "length_penalty": 0.0, "ignore_eos": True}
        answer = client.completions.create(**asked, n=min(width, 3), extra_body=extra)
        sums = [sum(c.logprobs.token_logprobs) for c in answer.choices]  # type: ignore[union-attr, misc]
        assert sums == sorted(sums, reverse=True)
        assert len({c.text for c in answer.choices}) == len(sums)
        totals.append(sums[0])
        parts = client.completions.create(**asked, n=min(width, 3), extra_body=extra, stream=True)
        assert {p.choices[0].index: p.choices[0].text for p in parts} == {
            c.index: c.text for c in answer.choices
        }
    assert totals[0] < totals[1] <= totals[2]
    greedy = client.completions.create(**asked, temperature=0, extra_body={"ignore_eos": True}).choices[0]
    assert sum(greedy.logprobs.token_logprobs) == totals[0]  # type: ignore[union-attr, arg-type]


def test_best_of_and_typical_p(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "quill", "prompt": TEXT, "max_tokens": 10, "seed": 4, "logprobs": 0}
    extra = {"typical_p": 0.6, "ignore_eos": True}
    all_five = client.completions.create(**asked, n=5, extra_body=extra).choices
    means = {c.text: sum(c.logprobs.token_logprobs) / 10 for c in all_five}  # type: ignore[union-attr, misc]
    best = client.completions.create(**asked, n=2, best_of=5, extra_body=extra)
    assert [c.text for c in best.choices] == sorted(means, key=lambda text: -means[text])[:2]
    assert best.usage is not None
    assert best.usage.completion_tokens == 50
    free = client.completions.create(**asked, n=5, extra_body={"ignore_eos": True}).choices
    assert {c.text for c in free} != set(means)

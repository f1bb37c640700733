"""Three tokens per sequence and step give what one token per step gives: ids, log-probabilities, text, usage, ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import httpx
import pytest
from tests.api.asgi_client import app_with_jobs, events
from tests.engine.toy import byte_tokenizer, engine_config, model_info
from tests.fakes.engine import DRAFTING, FAKE
from tests.fakes.executor import FakeDrafts
from tests.fakes.model import FakeModel
from tests.scheduler.harness import Engine, make_scheduler, oracle, request

from quire.clock import WallClock
from quire.engine.frontend import Frontend
from quire.engine.in_process import InProcessClient
from quire.request import FinishReason, Request, TokenLogprobs
from quire.text.chat_template import ChatTemplate

MODEL = FakeModel(vocab_size=40, eos_probability=0.0)
ALL_RIGHT, SOME_WRONG = FakeDrafts(2), FakeDrafts(2, 0.4)


def run(
    requests: Sequence[Request], drafts: FakeDrafts, *, in_flight: int = 1, **config: object
) -> tuple[dict[str, Any], Engine]:
    """Return what each sample got, and the engine."""
    engine = Engine(
        make_scheduler(max_num_drafts=drafts.most, **config), in_flight=in_flight, model=MODEL, drafts=drafts
    )
    engine.put(requests)
    engine.run()
    got = {}
    for (name, index), seen in engine.events.items():
        logprobs: list[TokenLogprobs] = [entry for event in seen for entry in event.logprobs or ()]
        end = engine.end(name, index)
        got[f"{name}/{index}"] = (
            engine.tokens(name, index), logprobs, end.finish_reason, end.stop_token_id, end.error
        )  # fmt: skip
    return got, engine


def mixed() -> list[Request]:
    """Prompts that share a prefix, samples, stop ids, a minimum of tokens, log-probabilities, ends by length."""
    shared = list(range(12))
    return [
        request("a", shared, max_tokens=20, logprobs=2),
        request("b", [*shared, 20, 21], max_tokens=17, n=3, temperature=1.0, seed=3),
        request("c", [*shared, 30], max_tokens=19, stop_token_ids=(3, 9, 14, 22, 31), logprobs=0),
        request("d", 7, max_tokens=18, stop_token_ids=tuple(range(0, 40, 3)), min_tokens=5),
        request("e", 30, max_tokens=1),
        request("f", 3, max_tokens=2, prompt_logprobs=1),
    ]


@pytest.mark.parametrize("drafts", [ALL_RIGHT, SOME_WRONG], ids=["all right", "some wrong"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_blocks": 14},
        {"max_num_batched_tokens": 5},
        {"max_num_seqs": 2},
        {"caching": False, "block_size": 2},
        {"windows": (None, 6), "num_blocks": 90},
        {"in_flight": 2},
        {"in_flight": 2, "num_blocks": 14},
    ],
    ids=str,
)
def test_drafts_change_no_token(config: dict[str, Any], drafts: FakeDrafts) -> None:
    one, _ = run(mixed(), FakeDrafts(0), **config)
    several, engine = run(mixed(), drafts, **config)
    assert several == one
    assert engine.executor.num_accepted > 0
    assert (engine.executor.num_rejected > 0) == (drafts.wrong > 0)
    stats = engine.core.stats()
    assert stats.num_generated_tokens >= sum(len(tokens) for tokens, *_ in one.values())
    assert stats.num_free_blocks + stats.num_idle_blocks == stats.num_blocks
    if config.get("num_blocks") == 14:
        assert stats.num_preemptions > 0


def test_a_step_gives_three_tokens() -> None:
    engine = Engine(make_scheduler(max_num_drafts=2), model=MODEL, drafts=ALL_RIGHT)
    one = request("a", 8, max_tokens=10)
    engine.put([one])
    engine.run()
    assert [len(event.token_ids) for event in engine.events["a", 0]] == [1, 3, 3, 3]
    assert engine.tokens("a") == oracle(one, model=MODEL)
    end = engine.end("a")
    assert (end.finish_reason, end.timing.num_steps, end.timing.num_chunks) == (FinishReason.LENGTH, 4, 1)
    assert engine.core.stats().num_generated_tokens == 10


def test_tokens_past_a_stop_id_are_dropped() -> None:
    one = request("a", 8, max_tokens=12, logprobs=1)
    third = oracle(one, model=MODEL)[2]  # in the middle of the second step
    one = request("a", 8, max_tokens=12, logprobs=1, stop_token_ids=(third,))
    engine = Engine(make_scheduler(max_num_drafts=2), model=MODEL, drafts=ALL_RIGHT)
    engine.put([one])
    engine.run()
    end = engine.end("a")
    assert engine.tokens("a") == oracle(one, model=MODEL)[:3]
    assert (end.finish_reason, end.stop_token_id) == (FinishReason.STOP, third)
    assert end.logprobs is not None
    assert [entry.token_id for entry in end.logprobs] == list(end.token_ids)


def test_no_draft_is_planned_past_the_last_token() -> None:
    engine = Engine(make_scheduler(max_num_drafts=2), model=MODEL, drafts=ALL_RIGHT)
    engine.put([request("a", 8, max_tokens=3), request("b", 62, max_tokens=9)])
    engine.run()
    assert [len(event.token_ids) for event in engine.events["a", 0]] == [1, 2]
    assert len(engine.tokens("b")) == 2, "the context's end"


def test_rejected_drafts_give_their_blocks_back() -> None:
    engine = Engine(
        make_scheduler(block_size=4, caching=False, max_num_drafts=2), model=MODEL, drafts=FakeDrafts(2, 1.0)
    )
    engine.put([request("a", 6, max_tokens=9)])
    while not engine.events["a", 0]:
        engine.step()
    engine.step()  # tokens 6, 7, 8: the last draft took a third block, and was rejected
    assert engine.executor.num_rejected == 2
    assert engine.core.stats().num_free_blocks == 62
    engine.run()
    assert engine.tokens("a") == oracle(request("a", 6, max_tokens=9), model=MODEL)


def test_drafts_preempt_no_sequence() -> None:
    plain, engine = run(
        [request("a", 8, max_tokens=8), request("b", 8, max_tokens=8)], ALL_RIGHT, num_blocks=8
    )
    assert engine.core.stats().num_preemptions == 0
    assert plain["a/0"][0] == oracle(request("a", 8, max_tokens=8), model=MODEL)


BODIES: dict[str, dict[str, Any]] = {
    "logprobs": {"prompt": "It was a dark", "max_tokens": 25, "logprobs": 2, "seed": 5},
    "n": {"prompt": "It was", "max_tokens": 21, "n": 3, "seed": 9, "temperature": 1.0},
    "stop ids": {"prompt": "It was a", "max_tokens": 40, "seed": 1, "stop_token_ids": list(range(97, 110))},
    "echo": {"prompt": "It", "max_tokens": 8, "seed": 1, "echo": True, "logprobs": 1},
    "min": {"prompt": "It", "max_tokens": 33, "seed": 2, "min_tokens": 30},
    "stop": {"prompt": "It was a dark", "max_tokens": 60, "seed": 4, "stop": ["a", "e", "t"]},
}


def answers(executor: str, num_drafts: int) -> dict[str, Any]:
    """Return the API's answers to all bodies at once, whole and streamed, without ids and times."""

    async def main() -> dict[str, Any]:
        config = engine_config(num_kv_blocks=96, block_size=4, max_num_batched_tokens=16)
        config = replace(config, scheduler=replace(config.scheduler, max_num_drafts=num_drafts))
        client = InProcessClient(config, WallClock(), executor=executor)
        tokenizer = byte_tokenizer()
        template = ChatTemplate.of(tokenizer, datetime.now)
        frontend = Frontend(client, tokenizer, template, model_info(), WallClock(), new_seed=lambda: 7)
        await frontend.start()
        transport = httpx.ASGITransport(app=app_with_jobs(frontend))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            try:
                whole = [
                    http.post("/v1/completions", json={"model": "toy", **body}) for body in BODIES.values()
                ]
                streamed = [
                    http.post("/v1/completions", json={"model": "toy", "stream": True, **body})
                    for body in BODIES.values()
                ]
                responses = await asyncio.gather(*whole, *streamed)
                accepted = client.core.executor.num_accepted  # type: ignore[attr-defined]
            finally:
                await frontend.close()
        got: dict[str, Any] = {"accepted drafts": accepted}
        for name, response in zip(BODIES, responses, strict=False):
            assert response.status_code == 200, response.text
            body = response.json()
            del body["usage"]["prompt_tokens_details"]  # what is cached depends on when others ran
            got[name] = (body["choices"], body["usage"])
        for name, response in zip(BODIES, responses[len(BODIES) :], strict=True):
            texts: dict[int, str] = {}
            for chunk in events(response):
                for choice in chunk["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            got[f"{name}, streamed"] = texts
        return got

    return asyncio.run(main())


@pytest.mark.parametrize("wrong", ["0", "0.4"])
def test_the_api_answers_the_same(wrong: str) -> None:
    one, several = answers(FAKE, 0), answers(f"{DRAFTING}@{wrong}", 2)
    assert (one.pop("accepted drafts") > 0, several.pop("accepted drafts") > 0) == (False, True)
    assert several == one

"""Prompts in, streams of text out, over a real core with the fake executor in this process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import datetime
from typing import Any

import pytest
from tests.engine.scripted import ScriptedClient
from tests.engine.toy import BOS, VOCAB, byte_tokenizer, engine_config, ids, model_info
from tests.engine.wired import WiredClient
from tests.fakes.engine import FAKE
from tests.fakes.integrity import check_integrity
from tests.fakes.model import FakeModel, fake_tokens

from quire.clock import WallClock
from quire.engine.client import EngineClient
from quire.engine.frontend import Frontend
from quire.engine.in_process import InProcessClient
from quire.engine.output import OutputChunk, merge
from quire.engine.process import ProcessClient
from quire.engine.prompts import prepare_request
from quire.engine.supervisor import RestartPolicy, Supervisor
from quire.errors import CapacityError, EngineDeadError, ModelLoadError, RequestError
from quire.request import FinishReason, SamplingParams, Terms, ThinkingBudget
from quire.text.chat_template import ChatTemplate

pytestmark = pytest.mark.system

TOKENIZER = byte_tokenizer()
TEMPLATE = ChatTemplate.of(TOKENIZER, datetime.now)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


def frontend_over(client: EngineClient) -> Frontend:
    return Frontend(client, TOKENIZER, TEMPLATE, model_info(), WallClock(), new_seed=lambda: 77)


def with_frontend(
    body: Callable[[Frontend, InProcessClient], Awaitable[None]], executor: str = FAKE, **settings: object
) -> None:
    """Run ``body`` with a started frontend; all blocks must be free at the end."""

    async def main() -> None:
        client = InProcessClient(engine_config(**settings), WallClock(), executor=executor)
        frontend = frontend_over(client)
        await frontend.start()
        try:
            await asyncio.wait_for(body(frontend, client), 30)
            await until(lambda: not client.core.has_work)
            check_integrity(client.core.scheduler)
            assert frontend.num_requests == 0
            assert client.core.stats().num_running == 0
        finally:
            await frontend.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen in time")


def tokens_of(prompt: str, sampling: SamplingParams, index: int = 0) -> list[int]:
    """Return the tokens that the engine must sample, including stop ids."""
    return fake_tokens(ids(prompt), sampling, index, sampling.max_tokens or 0, FakeModel(vocab_size=VOCAB))


def test_streams_equal_non_streams() -> None:
    async def body(frontend: Frontend, client: InProcessClient) -> None:
        params = [
            SamplingParams(max_tokens=30, seed=1),
            SamplingParams(max_tokens=50, seed=2, n=3, logprobs=2),
            SamplingParams(max_tokens=40, temperature=0.0, stop=["e", "zz"]),
            SamplingParams(max_tokens=40, seed=3, ignore_eos=True),
        ]
        whole = await asyncio.gather(*[collect(frontend, f"prompt {i}", p) for i, p in enumerate(params)])
        for i, sampling in enumerate(params):
            parts: list[list[OutputChunk]] = [[] for _ in range(sampling.n)]
            stream = await frontend.submit(f"prompt {i}", sampling)
            async for chunk in stream:
                parts[chunk.index].append(chunk)
            assert tuple(merge(p) for p in parts) == whole[i]
            for chunks in parts:
                assert [c.finish_reason is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
            assert stream.output.num_output_tokens == sum(len(c.token_ids) for c in whole[i])

    with_frontend(body)


async def collect(frontend: Frontend, prompt: str, sampling: SamplingParams) -> tuple[OutputChunk, ...]:
    return await (await frontend.submit(prompt, sampling)).collect()


def test_ids_are_the_engines_and_n_differ() -> None:
    async def body(frontend: Frontend, client: InProcessClient) -> None:
        sampling = SamplingParams(n=3, seed=5, max_tokens=20, ignore_eos=True)
        stream = await frontend.submit("abc", sampling)
        assert stream.prompt_token_ids == ids("abc")
        assert stream.seed == 5
        chunks = await stream.collect()
        for index, chunk in enumerate(chunks):
            assert list(chunk.token_ids) == tokens_of("abc", sampling, index)
            assert chunk.finish_reason is FinishReason.LENGTH
        assert len({c.text for c in chunks}) == 3
        unseeded = await frontend.submit("abc", SamplingParams(max_tokens=2))
        assert unseeded.seed == 77
        await unseeded.collect()

    with_frontend(body)


def test_stop_string_over_tokens_ends_the_engines_sample() -> None:
    async def body(frontend: Frontend, client: InProcessClient) -> None:
        free = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
        (full,) = await collect(frontend, "abc", free)
        stop = next(  # two characters that the model writes one after the other, far from the end
            full.text[i : i + 2] for i in range(8, 40) if full.text.find(full.text[i : i + 2]) == i
        )
        before = client.core.stats().num_generated_tokens
        (cut,) = await collect(
            frontend, "abc", SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, stop=[stop])
        )
        assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, stop)
        assert cut.text == full.text[: full.text.index(stop)]
        assert cut.token_ids == full.token_ids[: len(cut.token_ids)]
        await until(lambda: not client.core.has_work)
        generated = client.core.stats().num_generated_tokens - before
        assert generated <= len(cut.token_ids) + 3, "the core went on after the stop string"

    with_frontend(body, f"{FAKE}@5")


@pytest.mark.parametrize("how", ["break", "cancel", "abort", "aclose"])
def test_leaving_a_stream_frees_its_blocks_within_two_steps(how: str) -> None:
    async def read(frontend: Frontend) -> None:
        stream = await frontend.submit("x" * 40, SamplingParams(max_tokens=200, ignore_eos=True, n=2))
        async with aclosing(stream):
            async for chunk in stream:
                assert chunk.finish_reason is None or how == "abort"
                if stream.output.num_output_tokens >= 6:
                    if how == "break":
                        break
                    if how == "cancel":
                        raise asyncio.CancelledError
                    if how == "aclose":
                        await stream.aclose()
                    await stream.abort()

    async def body(frontend: Frontend, client: InProcessClient) -> None:
        task = asyncio.ensure_future(read(frontend))
        await asyncio.wait([task])
        assert task.cancelled() == (how == "cancel")
        steps = client.core.stats().num_steps
        await until(lambda: client.stats().num_running == 0 and not client.core.has_work)
        stats = client.core.stats()
        assert stats.num_steps <= steps + 2
        assert stats.num_free_blocks + stats.num_idle_blocks == stats.num_blocks

    with_frontend(body, f"{FAKE}@5")


def test_an_aborted_stream_ends_each_sample_once() -> None:
    async def body(frontend: Frontend, client: InProcessClient) -> None:
        stream = await frontend.submit("abc", SamplingParams(n=2, max_tokens=200, ignore_eos=True))
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 4:
                await stream.abort()
        ends = [c.index for c in chunks if c.finish_reason is FinishReason.ABORT]
        assert sorted(ends) == [0, 1]

    with_frontend(body, f"{FAKE}@5")


def test_a_request_id_may_be_used_again_at_once() -> None:
    async def body(frontend: Frontend, client: InProcessClient) -> None:
        for i in range(5):
            sampling = SamplingParams(max_tokens=30, seed=i, ignore_eos=True)
            stream = await frontend.submit(f"p{i}", sampling, request_id="same")
            assert stream.request_id == "same"
            if i < 4:
                async for _ in stream:
                    break
            else:
                (chunk,) = await stream.collect()
                assert list(chunk.token_ids) == tokens_of("p4", sampling)

    with_frontend(body, f"{FAKE}@2")


def test_chats_are_rendered_without_a_second_bos() -> None:
    async def body(frontend: Frontend, client: InProcessClient) -> None:
        text, prompt = await frontend.prompts.chat([{"role": "user", "content": "hi"}])
        assert text.startswith("<bos>")
        assert prompt == [BOS, *ids("[user] hi\n[assistant] ")]
        last = {"role": "assistant", "content": "well"}
        _, prompt = await frontend.prompts.chat([last], continue_final_message=True)
        assert prompt == [BOS, *ids("[assistant] well")]
        assert await frontend.prompts.tokenize("y" * 9000) == list(ids("y" * 9000))

    with_frontend(body)


@pytest.mark.parametrize(
    ("prompt", "sampling", "param", "says"),
    [
        ("x" * 300, {"max_tokens": 5}, "prompt", ("300", "5", "256")),
        ("x" * 256, {"max_tokens": None}, "prompt", ("256", "not set")),
        ("x" * 250, {"max_tokens": 7}, "max_tokens", ("250", "7", "256")),
        ("x" * 250, {"max_tokens": None, "min_tokens": 7}, "min_tokens", ("250", "7", "256")),
        ("", {}, "prompt", ("empty",)),
        ([1, 258], {}, "prompt", ("258", "257")),
        ([1, -1], {}, "prompt", ("-1",)),
        ("x", {"logit_bias": {258: 1.0}}, "logit_bias", ("258",)),
        ("x", {"stop_token_ids": [999]}, "stop_token_ids", ("999",)),
        ("x", {"allowed_token_ids": [999]}, "allowed_token_ids", ("999",)),
    ],
)
def test_refusals_name_the_field_and_the_numbers(
    prompt: str, sampling: dict[str, object], param: str, says: tuple[str, ...]
) -> None:
    async def body(frontend: Frontend, client: InProcessClient) -> None:
        with pytest.raises(RequestError) as caught:
            await frontend.submit(prompt, SamplingParams(**sampling))  # type: ignore[arg-type]
        assert caught.value.param == param
        for word in says:
            assert word in str(caught.value)

    with_frontend(body)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("allowed_token_ids", {"allowed_token_ids": [100]}),
        ("logit_bias", {"logit_bias": {100: 1.0}}),
        ("bad_words", {"bad_words": ["no"]}),
        ("thinking_budget", {"thinking_budget": ThinkingBudget(4, 99, 100, is_open=False)}),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_by_name(field: str, options: dict[str, Any]) -> None:
    sampling, model = SamplingParams(**options), model_info(vocab_size=100)
    with pytest.raises(RequestError, match=f"{field} holds the token id 1[01]") as caught:
        prepare_request("r", [1], sampling, model, TOKENIZER, arrival_s=0.0, seed=1)
    assert caught.value.param == field


def test_defaults_are_resolved() -> None:
    async def body(frontend: Frontend, client: InProcessClient) -> None:
        (chunk,) = await collect(frontend, "x" * 200, SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(chunk.token_ids) == 56
        sampling = SamplingParams(max_tokens=4, bad_words=["no"])
        stream = await frontend.submit("x", sampling)
        assert stream.output.request.sampling.bad_words_token_ids == (ids("no"), ids(" no"))
        assert stream.output.request.sampling.eos_token_ids == (256,)
        await stream.collect()

    with_frontend(body)


def test_a_full_queue_is_an_answer() -> None:
    async def body(frontend: Frontend, client: InProcessClient) -> None:
        sampling = SamplingParams(max_tokens=50, ignore_eos=True)
        streams = [await frontend.submit(f"p{i}", sampling) for i in range(12)]
        answers = [await s.collect() for s in streams]
        refused = [c for (c,) in answers if c.finish_reason is FinishReason.ERROR]
        assert refused
        assert all(c.error_kind == "capacity" for c in refused)
        assert sum(c.finish_reason is FinishReason.LENGTH for (c,) in answers) == 12 - len(refused)

    with_frontend(body, f"{FAKE}@5", max_num_seqs=2, max_queue=3)


def test_drain_finishes_what_runs_then_aborts_the_rest() -> None:
    async def body(frontend: Frontend, client: InProcessClient) -> None:
        short = await frontend.submit("a", SamplingParams(max_tokens=3, ignore_eos=True))
        long = await frontend.submit("b", SamplingParams(max_tokens=250, ignore_eos=True))
        answers = asyncio.gather(short.collect(), long.collect())
        drained = asyncio.ensure_future(frontend.drain(0.4))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError, match="shutting down"):
            await frontend.submit("c", GREEDY)
        await drained
        (first,), (second,) = await answers
        assert first.finish_reason is FinishReason.LENGTH
        assert second.finish_reason is FinishReason.ABORT

    with_frontend(body, f"{FAKE}@10")


def test_closing_ends_every_stream() -> None:
    async def main() -> None:
        client = InProcessClient(engine_config(), WallClock(), executor=f"{FAKE}@5")
        frontend = frontend_over(client)
        with pytest.raises(CapacityError, match="loading"):
            await frontend.submit("a", GREEDY)
        await frontend.start()
        stream = await frontend.submit("a", SamplingParams(max_tokens=250, ignore_eos=True))
        answer = asyncio.ensure_future(stream.collect())
        await asyncio.sleep(0.05)
        await frontend.close()
        (chunk,) = await answer
        assert chunk.finish_reason is FinishReason.ABORT
        await frontend.close()

    asyncio.run(main())


def test_a_dead_engine_ends_streams_with_errors_and_refuses() -> None:
    async def main() -> None:
        frontend = frontend_over(ScriptedClient(die_after=3))
        await frontend.start()
        stream = await frontend.submit("a", SamplingParams(n=2, max_tokens=50))
        chunks = await asyncio.wait_for(stream.collect(), 60)
        assert [c.finish_reason for c in chunks] == [FinishReason.ERROR] * 2
        assert all("SIGKILL" in (c.error or "") and c.error_kind == "dead" for c in chunks)
        assert frontend.state == "dead"
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await frontend.submit("b", GREEDY)
        await frontend.close()

    asyncio.run(main())


def test_a_load_error_is_raised_by_start() -> None:
    async def main() -> None:
        client = ScriptedClient(load_error=ModelLoadError("the file is truncated"))
        frontend = frontend_over(client)
        with pytest.raises(ModelLoadError, match="truncated"):
            await frontend.start()
        assert frontend.state == "dead"
        await frontend.close()

    asyncio.run(main())


def test_closing_while_loading_ends_start() -> None:
    async def main() -> None:
        frontend = frontend_over(ProcessClient(engine_config(), executor=FAKE))
        started = asyncio.ensure_future(frontend.start())
        await asyncio.sleep(0.01)
        await frontend.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await started

    asyncio.run(main())


def test_text_streams_go_on_when_the_engine_is_killed() -> None:
    async def main() -> None:
        config = engine_config()
        started: list[ProcessClient] = []

        def start() -> ProcessClient:
            started.append(ProcessClient(config, executor=f"{FAKE}@5"))
            return started[-1]

        frontend = frontend_over(Supervisor(start(), start, WallClock(), RestartPolicy(backoff_s=0.0)))
        await frontend.start()
        params = [
            SamplingParams(max_tokens=120, seed=i, n=1 + i % 2, ignore_eos=True, stop=["q", "Zx"], logprobs=1)
            for i in range(4)
        ]
        answers = asyncio.gather(*[collect(frontend, f"p{i}", p) for i, p in enumerate(params)])
        await asyncio.sleep(0.15)
        assert frontend.num_requests > 0, "too fast for this test"
        os.kill(started[0].pid, signal.SIGKILL)
        disturbed = await asyncio.wait_for(answers, 60)
        assert len(started) == 2
        for i, sampling in enumerate(params):
            assert disturbed[i] == await collect(frontend, f"p{i}", sampling)
        await frontend.close()

    asyncio.run(main())


def test_two_engines_in_one_process_do_not_mix() -> None:
    async def main() -> None:
        frontends = []
        for _ in range(2):
            frontend = frontend_over(InProcessClient(engine_config(), WallClock(), executor=f"{FAKE}@1"))
            await frontend.start()
            frontends.append(frontend)
        sampling = SamplingParams(max_tokens=40, seed=1, ignore_eos=True)
        prompts = [f"p{i % 3}" for i in range(12)]
        answers = await asyncio.gather(
            *[collect(frontends[i % 2], p, sampling) for i, p in enumerate(prompts)]
        )
        for prompt, (chunk,) in zip(prompts, answers, strict=True):
            assert list(chunk.token_ids) == tokens_of(prompt, sampling)
        for frontend in frontends:
            await frontend.close()

    asyncio.run(main())


def test_what_is_over_takes_no_memory() -> None:
    async def body(frontend: Frontend, client: InProcessClient) -> None:
        for batch in range(10):
            await asyncio.gather(*[collect(frontend, f"{batch} {i}", GREEDY) for i in range(10)])
        assert not len(frontend.streams)
        state = client.core.scheduler.state
        assert not state.requests
        assert not state.sequences

    with_frontend(body)


def test_request_that_cannot_be_sent_opens_no_stream() -> None:
    async def main() -> None:
        client = WiredClient(engine_config(), WallClock(), executor=FAKE)
        frontend = frontend_over(Supervisor(client, lambda: client, WallClock()))
        await frontend.start()
        with pytest.raises(OverflowError):
            await frontend.submit("a", GREEDY, terms=Terms(priority=2**64))
        assert [message.terms.priority for message in client.lost] == [2**64]
        assert frontend.num_requests == 0
        await asyncio.wait_for(frontend.drain(30.0), 1)
        await frontend.close()

    asyncio.run(main())

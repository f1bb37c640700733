"""Token events to text: stop strings across tokens, exactly one end, nothing taken back."""

from __future__ import annotations

import random

import pytest
from tests.engine.toy import EOS, byte_tokenizer, events, ids

from quire.engine.messages import FinishSample
from quire.engine.output import OutputChunk, RequestOutputState, merge
from quire.request import FinishReason, Request, SampleTiming, SamplingParams, TokenEvent, TokenLogprobs

TOKENIZER = byte_tokenizer()


def state_of(**sampling: object) -> tuple[RequestOutputState, list[FinishSample]]:
    params = SamplingParams(**{"max_tokens": 99, "seed": 1, "eos_token_ids": (EOS,), **sampling})  # type: ignore[arg-type]
    sent: list[FinishSample] = []
    return RequestOutputState(Request("r", (1,), params, 0.0), TOKENIZER, sent.append), sent


def feed(state: RequestOutputState, given: list[TokenEvent]) -> list[OutputChunk]:
    return [chunk for event in given if (chunk := state.feed(event)) is not None]


def grouped(rng: random.Random, given: list[TokenEvent]) -> list[TokenEvent]:
    """The same tokens, several per event."""
    made: list[TokenEvent] = []
    for event in given:
        if made and rng.random() < 0.5:
            made[-1] = event._replace(token_ids=made[-1].token_ids + event.token_ids)
        else:
            made.append(event)
    return made


def test_text_comes_as_characters_complete() -> None:
    state, sent = state_of()
    chunks = feed(state, events("r", "wörld 🙂"))
    assert [c.text for c in chunks] == ["w", "", "ö", "r", "l", "d", " ", "", "", "", "🙂"]
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert state.finished
    assert sent == []


def test_half_a_character_comes_out_at_the_end() -> None:
    state, _ = state_of()
    assert merge(feed(state, events("r", b"ab\xc3"))).text == "ab\ufffd"


def test_stop_string_over_tokens_ends_at_once_and_tells_the_core() -> None:
    state, sent = state_of(stop=["ll\n"])
    given = events("r", "hello ll\nworld")
    chunks = feed(state, given)
    whole = merge(chunks)
    assert whole.text == "hello "
    assert whole.token_ids == ids("hello ll\n")
    assert (whole.finish_reason, whole.stop_reason) == (FinishReason.STOP, "ll\n")
    assert sent == [FinishSample("r", 0, 9)]
    assert state.num_output_tokens == 9
    assert sum(c.finish_reason is not None for c in chunks) == 1


def test_stop_string_on_the_last_token_sends_no_message() -> None:
    state, sent = state_of(stop=["o"])
    whole = merge(feed(state, events("r", "hello")))
    assert (whole.text, whole.finish_reason, whole.stop_reason) == ("hell", FinishReason.STOP, "o")
    assert sent == []


def test_ids_and_logprobs_are_cut_within_an_event() -> None:
    state, sent = state_of(stop=["c"], logprobs=0)
    entries = tuple(TokenLogprobs(t, -0.5, 1, (), ()) for t in ids("abcd"))
    chunk = state.feed(TokenEvent("r", 0, ids("abcd"), entries))
    assert chunk is not None
    assert chunk.token_ids == ids("abc")
    assert chunk.logprobs == entries[:3]
    assert sent == [FinishSample("r", 0, 3)]


def test_min_tokens_lets_an_early_stop_string_through() -> None:
    state, _ = state_of(stop=["b"], min_tokens=3)
    assert merge(feed(state, events("r", "abab!"))).text == "aba"


def test_stop_token_is_counted_but_not_shown() -> None:
    state, _ = state_of(stop_token_ids=[ord("z")])
    given = [*events("r", "ab", end=None), TokenEvent("r", 0, ids("z"), None, FinishReason.STOP, ord("z"))]
    whole = merge(feed(state, given))
    assert (whole.text, whole.token_ids, whole.stop_reason) == ("ab", ids("abz"), ord("z"))
    state, _ = state_of(stop_token_ids=[ord("z")], include_stop_str_in_output=True)
    assert merge(feed(state, given)).text == "abz"


def test_eos_has_no_stop_reason() -> None:
    state, _ = state_of()
    given = [*events("r", "ab", end=None), TokenEvent("r", 0, (EOS,), None, FinishReason.STOP, EOS)]
    whole = merge(feed(state, given))
    assert (whole.text, whole.stop_reason) == ("ab", None)


def test_end_releases_held_text_and_ignores_later_events() -> None:
    state, _ = state_of(n=2, stop=["xyz"])
    feed(state, events("r", "abxy", end=None))
    first, second = state.end(FinishReason.ABORT)
    assert (first.text, first.finish_reason) == ("xy", FinishReason.ABORT)
    assert (second.index, second.text) == (1, "")
    assert state.finished
    assert feed(state, events("r", "z")) == []
    assert state.end(FinishReason.ABORT) == []


def expected(text: str, stop: list[str], include: bool) -> tuple[str, int]:
    """The oracle: how much of ``text`` is shown, and how many bytes (= tokens) that takes."""
    ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
    if not ends:
        return text, len(text.encode())
    end, _, word = min(ends)
    return text[: end if include else end - len(word)], len(text[:end].encode())


@pytest.mark.parametrize("seed", range(4))
def test_any_split_gives_the_same_text(seed: int) -> None:
    rng = random.Random(seed)
    for case in range(150):
        text = "".join(rng.choices("abé🙂 ", k=rng.randint(1, 24)))
        stop = ["".join(rng.choices("abé ", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        include = rng.random() < 0.5
        state, sent = state_of(stop=stop, include_stop_str_in_output=include)
        given = grouped(rng, events("r", text))
        chunks = feed(state, given)
        shown, num_tokens = expected(text, stop, include)
        note = f"seed {seed} case {case}: {text!r} stop {stop!r}"
        whole = merge(chunks)
        assert whole.text == shown, note
        assert whole.token_ids == ids(text)[:num_tokens], note
        assert [c.finish_reason is not None for c in chunks] == [False] * (len(chunks) - 1) + [True], note
        ended_by_core = num_tokens > sum(len(e.token_ids) for e in given[:-1])
        assert len(sent) == (not ended_by_core), note


def test_costs_of_the_samples_are_added() -> None:
    output, _ = state_of(n=2, stop=["b"])
    output.feed(TokenEvent("r", 0, (97,), timing=SampleTiming(engine_s=1.0, kv_block_s=8.0)))
    output.feed(TokenEvent("r", 1, (97,), timing=SampleTiming(engine_s=0.5, kv_block_s=2.0)))
    output.feed(
        TokenEvent("r", 0, (98,), timing=SampleTiming(engine_s=1.5, kv_block_s=9.0))
    )  # its stop string
    assert output.engine_s == 2.0
    assert output.kv_block_s == 11.0

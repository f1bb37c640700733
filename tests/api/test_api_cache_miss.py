"""Where a prompt leaves what the cache has of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tests.api.fake_frontend import byte_tokenizer

from quire.api.cache_miss import RecentPrompts, located, miss_reason

MISS = "not in the cache from there on"
PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=8)


def num_common(a: list[int], b: list[int]) -> int:
    pairs = zip(a, b, strict=False)
    return next((i for i, (left, right) in enumerate(pairs) if left != right), min(len(a), len(b)))


def test_changed_token_is_found_within_its_block() -> None:
    recent = RecentPrompts()
    miss_reason(recent, "a", range(40), 0, "not in the cache", 16)
    changed = [*range(21), 99, *range(22, 40)]
    assert miss_reason(recent, "a", changed, 16, MISS, 16) == {"reason": "changed", "token": 21}


def test_longer_prompt_is_appended_behind_what_is_cached() -> None:
    recent = RecentPrompts()
    miss_reason(recent, "a", range(40), 0, "not in the cache", 16)
    assert miss_reason(recent, "a", range(60), 32, MISS, 16) == {"reason": "appended", "token": 40}
    # The answer to the second prompt, which is not remembered, was cached too.
    assert miss_reason(recent, "a", range(90), 64, MISS, 16) == {"reason": "appended", "token": 64}


def test_evicted_blocks_are_told_from_changed_tokens() -> None:
    recent = RecentPrompts()
    miss_reason(recent, "a", range(64), 0, "not in the cache", 16)
    assert miss_reason(recent, "a", range(64), 16, MISS, 16) == {"reason": "not_kept", "token": 16}
    assert miss_reason(recent, "a", range(64), 63, "", 16) is None


def test_no_prompt_of_another_caller_is_compared() -> None:
    recent = RecentPrompts()
    miss_reason(recent, "a", range(40), 0, "not in the cache", 16)
    assert miss_reason(recent, "b", range(38), 16, MISS, 16) == {"reason": "unseen", "token": 16}


@given(PROMPTS)
def test_common_tokens_are_those_of_the_nearest_prompt(prompts: list[list[int]]) -> None:
    recent, earlier = RecentPrompts(), list[list[int]]()
    for prompt in prompts:
        common = [num_common(prompt, other) for other in earlier]
        assert recent.compare("a", prompt)[0] == max(common, default=0)
        earlier.append(prompt)


@given(PROMPTS)
def test_memory_of_prompts_is_bounded(prompts: list[list[int]]) -> None:
    bounded = RecentPrompts(max_prompts=2, max_tokens=8)
    for prompt in prompts:
        bounded.compare("a", prompt)
        assert bounded.num_prompts <= 2
        assert bounded.num_tokens <= 8


def test_token_is_located_in_its_message() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How are you? "}]
    prompt = list(b"<system>Be brief.<user>How are you?<assistant>")
    for token, message in ((3, 0), (16, 0), (18, 1), (30, 1), (len(prompt) - 3, None)):
        where = located(token, prompt, messages, byte_tokenizer())
        assert where == {"text": bytes(prompt[token : token + 8]).decode(), "message": message}
    assert located(3, prompt, (), byte_tokenizer())["message"] is None

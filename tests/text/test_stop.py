"""Stop strings: against a naive reference, for every cut; no stop string leaks, no text is held back too long."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.stop import StopMatcher

TEXTS = st.text(alphabet="ab<|>é", max_size=24)
STOPS = st.lists(st.text(alphabet="ab<|>é", min_size=1, max_size=5), min_size=1, max_size=4)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Return the text that is shown in the end, and the stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


def may_show(seen: str, stops: list[str]) -> str:
    """Return ``seen`` without the longest tail that could still become a stop string."""
    holds = [n for n in range(len(seen) + 1) if any(stop.startswith(seen[len(seen) - n :]) for stop in stops)]
    return seen[: len(seen) - max(holds)]


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop_str_in_output=include)
    shown, seen = "", ""
    for piece in pieces:
        shown += matcher.feed(piece)
        seen += piece
        if matcher.matched is None:
            assert shown == may_show(seen, stops), "exactly what may be shown is shown"
    shown += matcher.finish()
    return shown, matcher.matched


@settings(max_examples=600, deadline=None)
@given(TEXTS, STOPS, st.booleans(), st.data())
def test_equal_to_the_naive_search_for_any_cut(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    assert run(pieces, stops, include) == naive(text, stops, include)


@settings(max_examples=40, deadline=None)
@given(
    st.text(alphabet="ab", max_size=8), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1)
)
def test_every_cut_of_short_texts(text: str, stops: list[str]) -> None:
    expected = naive(text, stops, False)
    for mask in range(1 << max(len(text) - 1, 0)):
        cuts = [i + 1 for i in range(len(text) - 1) if mask >> i & 1]
        pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
        assert run(pieces, stops, False) == expected


def test_nothing_leaks_and_nothing_is_held_without_need() -> None:
    matcher = StopMatcher(["<|end|>"])
    assert matcher.feed("Hello <") == "Hello "
    assert matcher.feed("b> <|en") == "<b> "
    assert matcher.feed("d|") == ""
    assert matcher.feed("> more") == ""
    assert matcher.matched == "<|end|>"
    assert matcher.feed("text") == ""
    assert matcher.finish() == ""


def test_the_stop_string_can_be_included() -> None:
    matcher = StopMatcher(["\n\n"], include_stop_str_in_output=True)
    assert matcher.feed("a\n") == "a"
    assert matcher.feed("\nb") == "\n\n"
    assert matcher.matched == "\n\n"


def test_the_earliest_completed_match_wins() -> None:
    early = StopMatcher(["abcdef", "cd"])
    assert early.feed("xabcdef") == "xab"
    assert early.matched == "cd"
    longer = StopMatcher(["c", "abc"])
    assert longer.feed("xabc") == "x"
    assert longer.matched == "abc"


def test_the_held_back_tail_comes_at_the_end() -> None:
    matcher = StopMatcher(["stop", "o!"])
    assert matcher.feed("do sto") == "do "
    assert matcher.finish() == "sto"
    assert matcher.matched is None


def test_text_before_min_tokens_does_not_count() -> None:
    matcher = StopMatcher(["end"])
    assert matcher.pass_through("the end, en") == "the end, en"
    assert matcher.feed("d and en") == "d and "
    assert matcher.pass_through("d?") == "end?"
    assert matcher.feed("end") == ""
    assert matcher.matched == "end"

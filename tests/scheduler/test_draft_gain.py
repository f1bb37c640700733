"""The measured gain of drafts: steps with them against steps without, of as many sequences."""

from __future__ import annotations

import pytest

from quire.scheduler.policies.draft_gain import DraftGain


def test_gain_compares_steps_of_as_many_sequences() -> None:
    gain = DraftGain()
    for slow_s in (0.5, 0.0, 0.0, 0.0):  # the first step finds nothing in the caches
        gain.note(1, 1, 0.004 + slow_s, drafted=False)
        gain.note(16, 16, 0.020 + slow_s, drafted=False)
    for _ in range(50):
        gain.note(1, 3, 0.006, drafted=True)  # three tokens in the time of one and a half
        gain.note(16, 24, 0.030, drafted=True)  # half as many more tokens, half as much more time
    assert gain.measured == pytest.approx((3 * 0.004 + 0.030) / (0.006 + 0.030), rel=0.05)


def test_gain_is_not_known_without_plain_steps() -> None:
    gain = DraftGain()
    gain.note(4, 9, 0.01, drafted=True)
    assert gain.measured == 0.0
    for _ in range(4):
        gain.note(1, 1, 0.004, drafted=False)  # of another number of sequences
    gain.note(4, 9, 0.01, drafted=True)
    assert gain.measured == 0.0


def test_gain_follows_what_changes() -> None:
    gain = DraftGain()
    for _ in range(4):
        gain.note(2, 2, 0.004, drafted=False)
    for _ in range(50):
        gain.note(2, 6, 0.006, drafted=True)
    assert gain.measured == pytest.approx(2.0)
    for _ in range(600):
        gain.note(2, 3, 0.006, drafted=True)
    assert gain.measured == pytest.approx(1.0, rel=0.01)

"""Which step is captured when, with seconds that the test gives."""

from __future__ import annotations

from quire.runner.graphs import MOST_DELAY_S, CapturePolicy


def launches(policy: CapturePolicy[str], size: str, count: int, took_s: float) -> None:
    for _ in range(count):
        policy.launched(size, took_s)


def test_a_busy_engine_captures_what_is_repaid() -> None:
    policy: CapturePolicy[str] = CapturePolicy()
    launches(policy, "8", 2, 0.01)
    assert policy.next(idle=False) is None, "0.02 s spent, 0.03 s expected"
    launches(policy, "8", 1, 0.01)
    assert policy.next(idle=False) == "8"


def test_an_idle_engine_captures_what_came_twice_the_most_frequent_first() -> None:
    policy: CapturePolicy[str] = CapturePolicy()
    launches(policy, "8", 1, 0.01)
    assert policy.next(idle=True) is None
    launches(policy, "8", 1, 0.01)
    launches(policy, "16", 5, 0.02)
    assert policy.next(idle=True) == "16"
    policy.captured("16", 0.05)
    assert policy.next(idle=True) == "8", "one at a time"
    policy.captured("8", 0.02)
    assert policy.next(idle=True) is None


def test_no_step_waits_longer_than_allowed() -> None:
    policy: CapturePolicy[str] = CapturePolicy()
    launches(policy, "large", 1000, 0.05)
    launches(policy, "small", 500, 0.01)
    assert MOST_DELAY_S < 3 * 0.05
    assert policy.next(idle=False) == "small"
    policy.captured("small", 0.015)  # less than thought: 1.5 launches
    assert policy.next(idle=False) == "large"
    policy.captured("large", 0.5)
    launches(policy, "other", 1000, 0.02)
    assert policy.next(idle=False) is None, "ten launches, 0.2 s"
    assert policy.next(idle=True) == "other"


def test_what_is_forgotten_is_counted_anew() -> None:
    policy: CapturePolicy[str] = CapturePolicy()
    launches(policy, "8", 5, 0.01)
    policy.forget()
    assert policy.next(idle=True) is None

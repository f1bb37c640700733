"""Restarts on a clock that the test moves."""

from __future__ import annotations

from quire.engine.restarts import Restarts


def test_pauses_double_and_fall_with_time() -> None:
    restarts, now, pauses = Restarts(600.0, 1.0, 8.0), 0.0, []
    for _ in range(6):
        pauses.append(restarts.pause_s(now))
        restarts.add(now)
        now += 10.0
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 8.0]
    assert restarts.count(now) == 6
    assert restarts.count(615.0) == 4, "those of 0 and 10 s count no more"
    assert restarts.pause_s(635.0) == 2.0
    assert (restarts.count(1e4), restarts.pause_s(1e4)) == (0, 0.0)

"""`Timeline`: running and waiting requests and blocks in use over the simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.sim.replica import Replica

_FIRST_INTERVAL_S = 0.1
_MOST_POINTS = 600


class Point(NamedTuple):
    """The cluster at one time; counts of all replicas together."""

    time_s: float
    num_running: int
    num_waiting: int
    kv_usage: float  # fraction of all blocks that sequences or steps hold
    num_output_tokens: int  # so far


class Timeline:
    """Points at even times. When there are too many, every other one goes and the gap doubles."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.next_s = 0.0
        self._interval_s = _FIRST_INTERVAL_S

    def sample(self, now: float, replicas: Sequence[Replica]) -> None:
        """Note the state at ``now``; not worth a call before `next_s`."""
        stats = [replica.stats() for replica in replicas]
        blocks = sum(s.num_blocks for s in stats)
        held = blocks - sum(s.num_free_blocks + s.num_idle_blocks for s in stats)
        self.points.append(
            Point(
                now,
                sum(s.num_running for s in stats),
                sum(s.num_waiting for s in stats),
                held / blocks,
                sum(s.num_generated_tokens for s in stats),
            )
        )
        if len(self.points) > _MOST_POINTS:
            del self.points[1::2]
            self._interval_s *= 2.0
        self.next_s = now + self._interval_s

"""`Router`: which replica gets a request. Pure: no clock, no I/O, and the same seed gives the same choices.

    random              any replica
    round-robin         the next replica
    least-loaded        the replica with the fewest requests in flight
    prefix-predicted    the replica with the longest cached prefix, by what the router sent where
    prefix-reported     the same, by the reports of the replicas (`quire.cache.events`)
    prefix-hybrid       the same, by the longer of the reported prefix and that of requests in flight

Load is the number of requests in flight. A prefix never overloads a replica: it is followed only where the load stays
within ``max_load_ratio`` of the mean (consistent hashing with bounded loads: Mirrokni, Thorup, Zadimoghaddam 2018).
Ties go to the least loaded replica, then to the next in turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from quire.cache.events import BlockStored, CacheEvent
from quire.errors import ConfigError, nearest
from quire.gateway.prefix_index import PendingIndex, PredictedIndex, ReportedIndex

Policy = Literal[
    "random", "round-robin", "least-loaded", "prefix-predicted", "prefix-reported", "prefix-hybrid"
]
POLICIES: tuple[Policy, ...] = get_args(Policy)
DEFAULT_CAPACITY = 1 << 16  # blocks per replica that the predicted index remembers


@dataclass(slots=True)
class _InFlight:
    replica: int
    chain: Sequence[bytes]
    pending: bool = True  # no first token yet


class Router:
    """Chooses among replicas 0 … n − 1 and counts the requests in flight at each."""

    def __init__(
        self,
        policy: str,
        num_replicas: int = 0,
        *,
        seed: int = 0,
        max_load_ratio: float = 1.25,
        capacity: int = DEFAULT_CAPACITY,
    ) -> None:
        if policy not in POLICIES:
            raise ConfigError(
                f"routing = {policy!r} must be one of {', '.join(POLICIES)}{nearest(policy, POLICIES)}"
            )
        if not max_load_ratio >= 1.0:
            raise ConfigError(f"max_load_ratio = {max_load_ratio!r} must be at least 1")
        self.policy = policy
        self.needs_chains = policy.startswith("prefix-")  # otherwise `route` needs no chain
        self.needs_events = policy in ("prefix-reported", "prefix-hybrid")  # otherwise `report` has no effect
        self._ratio = max_load_ratio
        self._random = Random(f"router {seed}")
        self._loads: list[int] = []
        self._alive: list[bool] = []
        self._turn = 0
        self._in_flight: dict[str, _InFlight] = {}
        self._predicted = PredictedIndex(capacity)
        self._reported = ReportedIndex()
        self._pending = PendingIndex()
        for _ in range(num_replicas):
            self.add_replica()

    @property
    def loads(self) -> tuple[int, ...]:
        """Requests in flight by replica."""
        return tuple(self._loads)

    def add_replica(self) -> int:
        """A replica is ready; return its number."""
        self._loads.append(0)
        self._alive.append(True)
        return len(self._loads) - 1

    def revive(self, replica: int) -> None:
        """A lost replica is back with an empty cache."""
        self._alive[replica] = True

    def lose(self, replica: int) -> list[str]:
        """A replica is gone. Return the requests in flight there, oldest first; each must be routed again."""
        self._alive[replica] = False
        lost = [request_id for request_id, f in self._in_flight.items() if f.replica == replica]
        for request_id in lost:
            self.finished(request_id)
        self._predicted.forget(replica)
        self._reported.forget(replica)
        return lost

    def route(self, request_id: str, chain: Sequence[bytes] = ()) -> int | None:
        """Choose a replica and count the request there until `finished`; None where no replica is alive.

        ``chain``: hashes of the prompt's full blocks.
        """
        assert request_id not in self._in_flight, f"request {request_id!r} is in flight"
        alive = [r for r, is_alive in enumerate(self._alive) if is_alive]
        if not alive:
            return None
        replica = self._choose(alive, chain)
        self._turn = replica + 1
        self._loads[replica] += 1
        self._in_flight[request_id] = _InFlight(replica, chain)
        if self.policy == "prefix-predicted":
            self._predicted.sent(replica, chain)
        elif self.policy == "prefix-hybrid":
            self._pending.sent(replica, chain)
        return replica

    def started(self, request_id: str) -> None:
        """The request's first token came: its prompt is in the replica's cache."""
        in_flight = self._in_flight.get(request_id)
        if in_flight is not None and in_flight.pending:
            in_flight.pending = False
            if self.policy == "prefix-hybrid":
                self._pending.arrived(in_flight.replica, in_flight.chain)

    def finished(self, request_id: str) -> None:
        """The request has ended, successfully or not."""
        self.started(request_id)
        in_flight = self._in_flight.pop(request_id, None)
        if in_flight is not None:
            self._loads[in_flight.replica] -= 1

    def report(self, replica: int, events: Iterable[CacheEvent]) -> bool:
        """Apply a replica's cache events. False: some were lost; pass a snapshot to `replace_report`."""
        return self._reported.apply(replica, events)

    def replace_report(self, replica: int, snapshot: Iterable[BlockStored]) -> None:
        """Replace what is known of a replica's cache by a snapshot."""
        self._reported.replace(replica, snapshot)

    def _choose(self, alive: list[int], chain: Sequence[bytes]) -> int:
        if self.policy == "random":
            return self._random.choice(alive)
        if self.policy == "round-robin":
            return min(alive, key=self._in_turn)
        if self.policy == "least-loaded" or not chain:
            return self._least_loaded(alive)
        depths = self._depths(chain)
        total = sum(self._loads[r] for r in alive)
        most = math.ceil(self._ratio * (total + 1) / len(alive))
        within = [r for r in alive if self._loads[r] < most]
        deepest = max(depths[r] for r in within)  # not empty: at least one replica is at or below the mean
        return self._least_loaded([r for r in within if depths[r] == deepest])

    def _depths(self, chain: Sequence[bytes]) -> list[int]:
        num = len(self._loads)
        if self.policy == "prefix-predicted":
            return self._predicted.holders.depths(chain, num)
        reported = self._reported.holders.depths(chain, num)
        if self.policy == "prefix-reported":
            return reported
        return [max(pair) for pair in zip(reported, self._pending.holders.depths(chain, num), strict=True)]

    def _least_loaded(self, replicas: Sequence[int]) -> int:
        return min(replicas, key=lambda r: (self._loads[r], self._in_turn(r)))

    def _in_turn(self, replica: int) -> int:
        """Return how many places after the next replica in turn ``replica`` comes."""
        return (replica - self._turn) % len(self._loads)

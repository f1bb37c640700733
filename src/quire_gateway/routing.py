"""`Router`: which replica gets a request. Pure: no clock, no I/O, and the same seed gives the same choices.

    random              any replica
    round-robin         the next replica
    least-loaded        the replica with the fewest requests in flight
    least-tokens        the replica with the fewest outstanding tokens (prompt and output of its requests in flight)
    power-of-two        the one with fewer outstanding tokens of two random replicas (Mitzenmacher 2001)
    session             the replica that the session's key hashes to, else the request's prefix
    prefix-hash         the replica that the first block of the prompt hashes to
    prefix-predicted    the replica with the lowest predicted cost, by what the router sent where
    prefix-reported     the same, by the reports of the replicas (`quire.cache.events`)
    prefix-hybrid       the same, by the longer of the reported prefix and that of requests in flight

The cost of a replica is the time of its queued and of the request's uncached prompt tokens at its pace (`TtftModel`),
plus that of the uncached tokens once more, since computing them takes capacity from others. What earlier requests
waited for besides prompts is left out: it would keep a replica that was full from traffic long after it has room.
Load is the number of requests in flight. A prefix or a key never overloads a replica: it is followed only where the
load stays within ``max_load_ratio`` of the mean (consistent hashing with bounded loads: Mirrokni, Thorup, Zadimoghaddam
2018), or at one request above it, so that a replica that runs a single one keeps its prefixes. Ties go to the least
loaded replica, then to the next in turn.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING, Literal, get_args

from quire.errors import ConfigError, nearest
from quire_gateway.ttft import TtftModel

if TYPE_CHECKING:
    from quire.cache.events import CacheEvent
    from quire_gateway.prefix_index import KnownPrefixes

Policy = Literal[
    "random", "round-robin", "least-loaded", "least-tokens", "power-of-two", "session", "prefix-hash",
    "prefix-predicted", "prefix-reported", "prefix-hybrid",
]  # fmt: skip
POLICIES: tuple[Policy, ...] = get_args(Policy)
_SLACK = 1  # requests above the mean that are no overload
DEFAULT_CAPACITY = 1 << 16  # blocks per replica that the predicted index remembers


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of a replica."""

    chain: Sequence[bytes] = ()  # hashes of the prompt's full blocks, or of the pieces of its text
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # at most, or expected
    key: bytes = b""  # of the session


@dataclass(slots=True)
class Load:
    """What is in flight at one replica."""

    requests: int = 0
    tokens: int = 0  # prompt and output tokens of these requests
    queued_tokens: int = 0  # uncached prompt tokens of those without a first token
    pending: int = 0  # requests without a first token


@dataclass(slots=True)
class _InFlight:
    replica: int
    demand: Demand
    uncached: int  # prompt tokens that the replica has to compute
    ahead: int  # queued tokens in front of the request's own
    pending: bool = True  # no first token yet


class NoPrefixes:
    """What is known of prefixes by a policy that does not go by them."""

    names = None
    ticks_to_live = 1

    def tick(self) -> None: ...

    def report(self, replica: int, events: Iterable[CacheEvent]) -> bool:
        return True

    def replace_report(self, replica: int, events: Iterable[CacheEvent]) -> None: ...

    def forget_report(self, replica: int) -> None: ...

    def depths(self, chain: Sequence[bytes], num_replicas: int) -> list[int]:
        return [0] * num_replicas

    def sent(self, replica: int, chain: Sequence[bytes]) -> None: ...

    def arrived(self, replica: int, chain: Sequence[bytes]) -> None: ...

    def forget(self, replica: int) -> None: ...


def _prefixes(policy: str, capacity: int, *, of_text: bool) -> KnownPrefixes:
    from quire_gateway.prefix_index import KnownPrefixes

    return KnownPrefixes(policy, capacity, of_text=of_text)


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
        of_text: bool = False,
    ) -> None:
        """``of_text``: the chains of demands are digests of text, not hashes of blocks."""
        if policy not in POLICIES:
            raise ConfigError(
                f"routing = {policy!r} must be one of {', '.join(POLICIES)}{nearest(policy, POLICIES)}"
            )
        if not max_load_ratio >= 1.0:
            raise ConfigError(f"max_load_ratio = {max_load_ratio!r} must be at least 1")
        self.policy = policy
        self.scores = policy in ("prefix-predicted", "prefix-reported", "prefix-hybrid")  # by cost
        self.needs_chains = self.scores or policy in ("session", "prefix-hash")  # else `route` needs no chain
        # Otherwise `prefixes.report` has no effect.
        self.needs_events = policy in ("prefix-reported", "prefix-hybrid")
        self.ttft = TtftModel()
        self.loads: list[Load] = []
        self._ratio = max_load_ratio
        self._random = Random(f"router {seed}")
        self._alive: list[bool] = []
        self._turn = 0
        self._in_flight: dict[str, _InFlight] = {}
        self.prefixes: KnownPrefixes | NoPrefixes = (
            _prefixes(policy, capacity, of_text=of_text) if self.scores else NoPrefixes()
        )
        for _ in range(num_replicas):
            self.add_replica()

    def add_replica(self) -> int:
        """A replica is ready; return its number."""
        self.loads.append(Load())
        self._alive.append(True)
        return len(self.loads) - 1

    def revive(self, replica: int) -> None:
        """A lost replica is back with an empty cache, or another one has its number."""
        self._alive[replica] = True

    def lose(self, replica: int) -> list[str]:
        """A replica is gone. Return the requests in flight there, oldest first; each must be routed again."""
        self._alive[replica] = False
        lost = [request_id for request_id, f in self._in_flight.items() if f.replica == replica]
        for request_id in lost:
            self.finished(request_id)
        self.prefixes.forget(replica)
        self.ttft.forget(replica)
        return lost

    def route(
        self, request_id: str, demand: Demand | None = None, among: Collection[int] | None = None
    ) -> int | None:
        """Choose a replica (of ``among``) and count the request there until `finished`; None where none is alive."""
        assert request_id not in self._in_flight, f"request {request_id!r} is in flight"
        demand = demand or Demand()
        alive = [r for r in (range(len(self._alive)) if among is None else among) if self._alive[r]]
        if not alive:
            return None
        depths = self._depths(demand.chain)
        replica = self._choose(alive, demand, depths)
        self._turn = replica + 1
        load, uncached = self.loads[replica], _uncached(demand, depths[replica])
        self._in_flight[request_id] = _InFlight(replica, demand, uncached, load.queued_tokens)
        load.requests += 1
        load.tokens += demand.num_prompt_tokens + demand.num_output_tokens
        load.queued_tokens += uncached
        load.pending += 1
        self.prefixes.sent(replica, demand.chain)
        return replica

    def started(self, request_id: str, ttft_s: float | None = None) -> None:
        """The request's first token came, ``ttft_s`` after `route`: its prompt is in the replica's cache."""
        in_flight = self._in_flight.get(request_id)
        if in_flight is None or not in_flight.pending:
            return
        in_flight.pending = False
        load = self.loads[in_flight.replica]
        load.queued_tokens -= in_flight.uncached
        load.pending -= 1
        if ttft_s is not None:
            self.ttft.observe(in_flight.replica, in_flight.ahead + in_flight.uncached, ttft_s)
        self.prefixes.arrived(in_flight.replica, in_flight.demand.chain)

    def finished(self, request_id: str) -> None:
        """The request has ended, successfully or not."""
        self.started(request_id)
        in_flight = self._in_flight.pop(request_id, None)
        if in_flight is not None:
            load, demand = self.loads[in_flight.replica], in_flight.demand
            load.requests -= 1
            load.tokens -= demand.num_prompt_tokens + demand.num_output_tokens

    def predicted_s(self, request_id: str) -> float:
        """Return the time to first token that was predicted for a request in flight."""
        in_flight = self._in_flight[request_id]
        return self.ttft.predict(in_flight.replica, in_flight.ahead + in_flight.uncached)

    def uncached(self, request_id: str) -> int:
        """Return the prompt tokens of a request in flight that its replica is to compute."""
        return self._in_flight[request_id].uncached

    def explain(self, demand: Demand, among: Iterable[int]) -> dict[int, dict[str, float]]:
        """Return per replica of ``among`` what a choice would be made by, now."""
        depths, pace_s = self._depths(demand.chain), self.ttft.pace_s
        return {
            r: {
                "requests": self.loads[r].requests,
                "tokens": self.loads[r].tokens,
                "queued_tokens": self.loads[r].queued_tokens,
                "prefix": depths[r],
                "cost_ms": round(
                    1e3 * pace_s(r) * (self.loads[r].queued_tokens + 2 * _uncached(demand, depths[r])), 3
                ),
            }
            for r in among
        }

    def _choose(self, alive: list[int], demand: Demand, depths: list[int]) -> int:
        match self.policy:
            case "random":
                return self._random.choice(alive)
            case "round-robin":
                return min(alive, key=self._in_turn)
            case "least-tokens":
                return self._least(alive, by_tokens=True)
            case "power-of-two":
                return self._least(self._random.sample(alive, min(2, len(alive))), by_tokens=True)
            case "session" | "prefix-hash":
                key = (self.policy == "session" and demand.key) or b"".join(demand.chain[:1])
                within = self._within(alive) if key else []
                return max(within, key=lambda r: _rendezvous(key, r)) if within else self._least(alive)
        if self.policy == "least-loaded" or not demand.chain:
            return self._least(alive)
        return self._least(self._cheapest(self._within(alive), demand, depths))

    def _cheapest(self, replicas: Sequence[int], demand: Demand, depths: Sequence[int]) -> list[int]:
        """Return the replicas with the lowest cost; ``replicas`` is not empty."""
        lowest, cheapest = math.inf, list[int]()
        loads, pace_s, all_tokens = self.loads, self.ttft.pace_s, _uncached(demand, 0)
        for r in replicas:
            uncached = _uncached(demand, depths[r]) if depths[r] else all_tokens
            cost = pace_s(r) * (loads[r].queued_tokens + 2 * uncached)
            if cost < lowest:
                lowest, cheapest = cost, [r]
            elif cost == lowest:
                cheapest.append(r)
        return cheapest

    def _within(self, alive: list[int]) -> list[int]:
        """Return the replicas whose load stays within the bound with one request more."""
        loads = self.loads
        requests = [loads[r].requests for r in alive]
        mean = (sum(requests) + 1) / len(alive)
        most = max(math.ceil(self._ratio * mean), math.ceil(mean) + _SLACK)
        return [r for r, num in zip(alive, requests, strict=True) if num < most]

    def _depths(self, chain: Sequence[bytes]) -> list[int]:
        num = len(self.loads)
        return self.prefixes.depths(chain, num)

    def _least(self, replicas: Sequence[int], *, by_tokens: bool = False) -> int:
        loads = self.loads
        return min(
            replicas,
            key=lambda r: (loads[r].tokens if by_tokens else 0, loads[r].requests, self._in_turn(r)),
        )

    def _in_turn(self, replica: int) -> int:
        """Return how many places after the next replica in turn ``replica`` comes."""
        return (replica - self._turn) % len(self.loads)


def _uncached(demand: Demand, depth: int) -> int:
    """Return the prompt tokens behind the first ``depth`` blocks; without a count of tokens, a block is one."""
    num = demand.num_prompt_tokens or len(demand.chain)
    return num - num * depth // len(demand.chain) if depth else num


def _rendezvous(key: bytes, replica: int) -> bytes:
    """Return the weight of a replica for a key: the highest wins (Thaler and Ravishankar 1998)."""
    return blake2b(key + replica.to_bytes(4, "big"), digest_size=8).digest()

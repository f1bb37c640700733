"""`Scaler`: lets a policy of `quire_gateway.autoscale` add and take away replicas of a simulated cluster.

A replica that is taken away gets no new requests and ends with its last one; until then, and from the moment it is
asked for, it counts as rented.
"""

from __future__ import annotations

from quire_gateway.autoscale import Policy, Seen
from quire_lab.sim.cluster import Cluster

Scaling = tuple[Policy, float]  # policy, seconds between two looks


class Scaler:
    """Looks every ``interval_s`` until the workload is over."""

    def __init__(self, cluster: Cluster, policy: Policy, interval_s: float, num_requests: int) -> None:
        self._cluster, self._policy = cluster, policy
        self._interval_s = interval_s
        self._num_requests = num_requests
        self._ready = set(range(cluster.config.num_replicas))
        self._draining: set[int] = set()
        self._starting: dict[int, float] = {}  # replica asked for → since when it is rented
        self._rented_s = dict.fromkeys(self._ready, 0.0)  # replica → since when
        self._asked = 0
        self._replica_s = 0.0  # rented, of replicas that are gone
        self.peak = len(self._ready)
        cluster.routable = self._ready
        cluster.at(interval_s, self._look)

    def close(self, end_s: float) -> float:
        """Return the seconds for which replicas were rented; the last request ended at ``end_s``."""
        open_s = (end_s - since_s for since_s in (*self._rented_s.values(), *self._starting.values()))
        return self._replica_s + sum(max(seconds, 0.0) for seconds in open_s)

    def _look(self) -> None:
        cluster, now = self._cluster, self._cluster.clock.now()
        if len(cluster.client.records) == self._num_requests:
            return
        for number in [n for n in self._draining if not cluster.router.loads[n].requests]:
            self._draining.discard(number)
            cluster.router.lose(number)
            self._replica_s += now - self._rented_s.pop(number)
        self._apply(self._policy(self._seen(now)).replicas)
        self.peak = max(self.peak, len(self._rented_s) + len(self._starting))
        cluster.at(now + self._interval_s, self._look)

    def _seen(self, now: float) -> Seen:
        cluster = self._cluster
        records = cluster.client.records
        replicas = [*cluster.retired, *cluster.replicas]
        return Seen(
            time_s=now,
            num_arrivals=len(records) + len(cluster.client.sent),
            num_ended=len(records),
            num_prompt_tokens=sum(r.num_prompt_tokens - r.num_cached_tokens for r in records),
            num_output_tokens=sum(r.num_output_tokens for r in records),
            busy_s=sum(replica.executor.busy_s for replica in replicas),
            num_ready=len(self._ready),
        )

    def _apply(self, wanted: int) -> None:
        cluster, now = self._cluster, self._cluster.clock.now()
        while wanted > len(self._ready) + len(self._starting) and self._draining:
            self._ready.add(self._draining.pop())
        while wanted > len(self._ready) + len(self._starting):
            self._asked += 1
            self._starting[self._asked] = now
            cluster.at(now + cluster.config.start_up_s, lambda ticket=self._asked: self._start(ticket))  # type: ignore[misc]
        while wanted < len(self._ready) + len(self._starting) and self._starting:
            self._replica_s += now - self._starting.popitem()[1]
        while wanted < len(self._ready):
            number = min(self._ready, key=lambda n: (cluster.router.loads[n].requests, -n))
            self._ready.discard(number)
            self._draining.add(number)

    def _start(self, ticket: int) -> None:
        since_s = self._starting.pop(ticket, None)
        if since_s is None:  # it was taken back
            return
        cluster = self._cluster
        free = [n for n in range(len(cluster.replicas)) if n not in self._rented_s]
        number = free[0] if free else len(cluster.replicas)
        if free:
            cluster.retired.append(cluster.replicas[number])
        self._rented_s[number] = since_s
        self._ready.add(number)
        cluster.start(number)

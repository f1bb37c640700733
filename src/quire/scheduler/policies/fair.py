"""The order "fair": tenants share the engine by weight, after the virtual token counter of Sheng et al. 2024,
"Fairness in Serving Large Language Models", algorithm 2.

Each tenant has a counter of the service that it has had, divided by its weight, and the waiting tenant with the
smallest counter enters first; within a tenant the first that arrived does. Service is counted as

    1           for each prompt token that is computed (none for those from the prefix cache)
    DECODE      for each output token
    RESIDENCY   for each token of the KV cache that is held while an output token is computed

A tenant that comes back after a pause starts at the smallest counter of those at work: idle time cannot be saved up.
Outputs are counted when an order is asked for, so nothing is added to the loops that plan and apply tokens. Service is
counted from the first request of a named tenant on, whatever the order is then: a change to "fair" keeps what was
counted.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC

from quire.request import Tenant
from quire.scheduler.policy import Policy
from quire.scheduler.sequence import RequestState, Sequence
from quire.scheduler.state import SchedulerState
from quire.scheduler.waiting import StepRoom

DECODE = 2.0
RESIDENCY = 1.0 / 1024
MAX_IDLE_TENANTS = 4096


class Rule(Policy):
    """Has the shares of one engine, and orders by them where the settings say so."""

    def __init__(self, state: SchedulerState) -> None:
        self._state, self.shares = state, FairShares()
        state.waiting.group_by_tenant()
        for seq in state.sequences.values():
            self.shares.join(seq.group.request.terms.tenant)

    def budget(self, room: StepRoom) -> None:
        if self._state.config.order == "fair":
            room.order = self._order

    def on_add(self, group: RequestState) -> None:
        for _ in group.sequences:
            self.shares.join(group.request.terms.tenant)

    def on_start(self, seq: Sequence, forked: bool) -> None:
        if not forked:
            self.shares.charge_prompt(seq, seq.num_prompt - seq.num_planned)

    def on_end(self, seq: Sequence) -> None:
        self.shares.leave(seq)

    def _order(self, count: int) -> list[Sequence]:
        waiting = self._state.waiting.by_tenant
        assert waiting is not None
        return self.shares.order(waiting, self._state.running, count)


class FairShares:
    """The counters of one engine."""

    def __init__(self) -> None:
        self.served: dict[Tenant, float] = {}  # oldest tenant first
        self.at_work: Counter[Tenant] = Counter()  # sequences that have not ended, by tenant
        self._floor = 0.0  # the counter of the tenant that ended its work last

    def join(self, tenant: Tenant) -> None:
        """A sequence of ``tenant`` has arrived."""
        if not self.at_work[tenant]:
            others = [self.served[name] for name in self.at_work if name != tenant]
            floor = min(others) if others else self._floor
            self.served[tenant] = max(self.served.pop(tenant, 0.0), floor)
        self.at_work[tenant] += 1

    def leave(self, seq: Sequence) -> None:
        """A sequence has ended."""
        self._charge_output(seq)
        tenant = seq.group.request.terms.tenant
        self.at_work[tenant] -= 1
        if not self.at_work[tenant]:
            del self.at_work[tenant]
            self._floor = self.served[tenant]
            if len(self.served) > MAX_IDLE_TENANTS + len(self.at_work):
                del self.served[next(name for name in self.served if name not in self.at_work)]

    def charge_prompt(self, seq: Sequence, num_tokens: int) -> None:
        """Count the prompt of a sequence that enters for the first time, ``num_tokens`` of it not cached."""
        if not seq.num_preemptions:
            self._charge(seq, num_tokens)

    def order(
        self,
        waiting: Mapping[Tenant, SequenceABC[tuple[object, Sequence]]],
        running: Iterable[Sequence],
        count: int,
    ) -> list[Sequence]:
        """Return the first ``count`` that may enter. ``waiting``: tenant → (rank, sequence), in order of arrival.

        Each prompt counts for its tenant at once, so that several may enter in one step.
        """
        for seq in running:
            self._charge_output(seq)
        heap: list[tuple[float, int, Tenant, Iterator[tuple[object, Sequence]]]] = []
        for place, (tenant, those) in enumerate(waiting.items()):
            heap.append((self.served[tenant], place, tenant, iter(those)))
        heapq.heapify(heap)
        ordered: list[Sequence] = []
        while heap and len(ordered) < count:
            served, place, tenant, entries = heap[0]
            entry = next(entries, None)
            if entry is None:
                heapq.heappop(heap)
                continue
            seq = entry[1]
            ordered.append(seq)
            cost = seq.num_prompt / tenant.weight
            heapq.heapreplace(heap, (served + cost, place, tenant, entries))
        return ordered

    def _charge_output(self, seq: Sequence) -> None:
        total = len(seq.token_ids)
        num_new = total - max(seq.num_charged, seq.num_prompt)
        if num_new > 0:
            self._charge(seq, num_new * (DECODE + RESIDENCY * total))
        seq.num_charged = total

    def _charge(self, seq: Sequence, cost: float) -> None:
        tenant = seq.group.request.terms.tenant
        self.served[tenant] += cost / tenant.weight

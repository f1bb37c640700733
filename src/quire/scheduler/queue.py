"""What waits: sequences by rank (`WaitingQueue`, `FairShares`), the batch being formed (`Gate`), limits of time
(`Deadlines`).

An order is a sort key; equal ranks fall back to arrival, then to the sequence id.

    fcfs             arrival
    priority         Request.priority (smaller first), aged: each `AGING_S` of waiting count as one step of priority
    shortest-first   number of prompt tokens, then arrival; the output's length is not known
    longest-prefix   most tokens in the prefix tree at this moment, then arrival; among the first 128 that wait
    deadline         earliest limit first (EDF); a request without one ranks as if it had `UNBOUNDED_S`. Behind all
                     others: those that cannot meet their limit any more (`quire.scheduler.deadline.demote`)
    fair             the tenant that has had the least service by its weight (`FairShares`), then arrival

The same key ranks running sequences when blocks run out: the last one is preempted first. Running sequences have
their prefix already, so under longest-prefix, and under fair, they rank by arrival.

A gate decides when sequences may enter.

    continuous   always
    static       when nothing runs: a batch of those that wait, and nothing joins it
    dynamic      as static, but the batch starts only when it is full or its oldest has waited long enough

A batch is a number of seats. A sequence that left its seat without ending (preempted, or a sibling that found no
room at its fork) gets it back.

**The order "fair"**: tenants share the engine by weight, after the virtual token counter of Sheng et al. 2024,
"Fairness in Serving Large Language Models", algorithm 2.

Each tenant has a counter of the service that it has had, divided by its weight, and the waiting tenant with the
smallest counter enters first; within a tenant the first that arrived does. Service is counted as

    PREFILL     for each prompt token that is computed (none for those from the prefix cache)
    DECODE      for each output token
    RESIDENCY   for each token of the KV cache that is held while an output token is computed

A tenant that comes back after a pause starts at the smallest counter of those at work: idle time cannot be saved up.
Outputs are counted when an order is asked for, so nothing is added to the loops that plan and apply tokens.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC

from quire.config import OrderKind, SchedulerConfig
from quire.request import Deadline, Request, Tenant
from quire.scheduler.sequence import Sequence, SortKey

AGING_S = 30.0  # of waiting that make up for one step of priority
MAX_STEPS = 1000  # of priority that count against time; further ones only break ties
UNBOUNDED_S = 60.0  # limit that a request without a deadline ranks by, so that it is admitted some time


def aged_s(request: Request) -> float:
    """Return the rank of a request under the order priority, in seconds.

    The rank does not depend on the time: of two requests that wait, the difference of their ages stays. A request is
    overtaken only by those that arrive less than `AGING_S` after it per step of priority, so that none starves.
    """
    return request.arrival_s + AGING_S * min(max(request.priority, -MAX_STEPS), MAX_STEPS)


def due_s(request: Request, *, has_token: bool) -> float:
    """Return the time of the next limit of ``request``."""
    deadline = request.deadline or Deadline()
    limits = (deadline.total_s, None if has_token else deadline.first_token_s)
    return request.arrival_s + min((limit for limit in limits if limit is not None), default=UNBOUNDED_S)


def sort_key(order: OrderKind, seq: Sequence) -> SortKey:
    """Return the rank of a sequence; smaller comes first."""
    request = seq.group.request
    if order == "priority":
        return (aged_s(request), request.priority, request.arrival_s, seq.seq_id)
    if order == "shortest-first":
        return (seq.num_prompt, request.arrival_s, seq.seq_id)
    if order == "deadline":
        return (seq.late, due_s(request, has_token=seq.ttft_s is not None), request.arrival_s, seq.seq_id)
    return (request.arrival_s, seq.seq_id)


def _rank(entry: tuple[SortKey, Sequence]) -> SortKey:
    return entry[0]


class WaitingQueue:
    """Waiting sequences by rank."""

    def __init__(self) -> None:
        self._entries: list[tuple[SortKey, Sequence]] = []
        self.by_tenant: dict[Tenant, list[tuple[SortKey, Sequence]]] = {}  # the same entries
        self.num_tokens = 0  # of their prompts
        self.num_bytes = 0  # of their requests

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, seq in self._entries)

    def add(self, seq: Sequence) -> None:
        own = self.by_tenant.setdefault(seq.group.request.tenant, [])
        for entries in (self._entries, own):
            insort(entries, (seq.key, seq), key=_rank)
        self.num_tokens += seq.num_prompt
        self.num_bytes += seq.group.num_bytes

    def remove(self, seq: Sequence) -> None:
        tenant = seq.group.request.tenant
        for entries in (self._entries, self.by_tenant[tenant]):
            index = bisect_left(entries, seq.key, key=_rank)
            assert entries[index][1] is seq
            del entries[index]
        if not self.by_tenant[tenant]:
            del self.by_tenant[tenant]
        self.num_tokens -= seq.num_prompt
        self.num_bytes -= seq.group.num_bytes

    def first(self, count: int) -> list[Sequence]:
        """Return the first ``count`` by rank."""
        return [seq for _, seq in self._entries[:count]]

    def reorder(self) -> None:
        """The keys changed."""
        waiting = list(self)
        self._entries.clear()
        self.by_tenant.clear()
        self.num_tokens = self.num_bytes = 0
        for seq in waiting:
            self.add(seq)

    def oldest_arrival_s(self) -> float:
        return min(seq.group.request.arrival_s for seq in self)


class Gate:
    """Counts the seats that the batch being formed still has."""

    def __init__(self) -> None:
        self._num_seats = 0

    def seats(
        self, config: SchedulerConfig, now: float, num_running: int, num_waiting: int, oldest_s: float
    ) -> int:
        """Return how many may enter now. ``oldest_s``: arrival of the oldest that waits."""
        if config.gate == "continuous":
            return num_waiting
        if num_waiting == 0:
            self._num_seats = 0  # what is left of a batch whose members went away
        elif self._num_seats == 0 and num_running == 0:
            full = num_waiting >= config.max_num_seqs
            if config.gate == "static" or full or now >= oldest_s + config.dynamic_max_wait_s:
                self._num_seats = min(num_waiting, config.max_num_seqs)
        return min(self._num_seats, num_waiting)

    def enter(self) -> None:
        """A sequence took a seat."""
        self._num_seats = max(0, self._num_seats - 1)

    def return_seat(self) -> None:
        """A sequence of the batch has to enter again."""
        self._num_seats += 1

    def opens_at(self, config: SchedulerConfig, num_running: int, oldest_s: float) -> float | None:
        """Return when time alone will open the gate (dynamic), or None."""
        if config.gate == "dynamic" and self._num_seats == 0 and num_running == 0:
            return oldest_s + config.dynamic_max_wait_s
        return None


class Deadlines:
    """The limits of the requests at work, the next one first. Those of requests that ended stay until they are due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, request: Request) -> None:
        deadline = request.deadline or Deadline()
        for limit_s in (deadline.first_token_s, deadline.total_s):
            if limit_s is not None:
                heapq.heappush(self._heap, (request.arrival_s + limit_s, request.request_id))

    def due(self, now: float) -> Iterator[str]:
        """Take out and yield the requests of which a limit has passed."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]

    @property
    def next_s(self) -> float | None:
        """When the next limit passes."""
        return self._heap[0][0] if self._heap else None


PREFILL = 1.0
DECODE = 2.0
RESIDENCY = 1.0 / 1024
MAX_IDLE_TENANTS = 4096


class FairShares:
    """The counters of one engine."""

    def __init__(self) -> None:
        self._served: dict[Tenant, float] = {}  # oldest tenant first
        self._at_work: Counter[Tenant] = Counter()  # sequences that have not ended, by tenant
        self._floor = 0.0  # the counter of the tenant that ended its work last

    def join(self, tenant: Tenant) -> None:
        """A sequence of ``tenant`` has arrived."""
        if not self._at_work[tenant]:
            others = [self._served[each] for each in self._at_work if each != tenant]
            floor = min(others) if others else self._floor
            self._served[tenant] = max(self._served.pop(tenant, 0.0), floor)
        self._at_work[tenant] += 1

    def leave(self, seq: Sequence) -> None:
        """A sequence has ended."""
        self._charge_output(seq)
        tenant = seq.group.request.tenant
        self._at_work[tenant] -= 1
        if not self._at_work[tenant]:
            del self._at_work[tenant]
            self._floor = self._served[tenant]
            if len(self._served) > MAX_IDLE_TENANTS + len(self._at_work):
                del self._served[next(each for each in self._served if each not in self._at_work)]

    def charge_prompt(self, seq: Sequence, num_tokens: int) -> None:
        """Count the prompt of a sequence that enters for the first time, ``num_tokens`` of it not cached."""
        if not seq.num_preemptions:
            self._charge(seq, PREFILL * num_tokens)

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
            heap.append((self._served[tenant], place, tenant, iter(those)))
        heapq.heapify(heap)
        found: list[Sequence] = []
        while heap and len(found) < count:
            served, place, tenant, entries = heap[0]
            entry = next(entries, None)
            if entry is None:
                heapq.heappop(heap)
                continue
            seq = entry[1]
            found.append(seq)
            cost = PREFILL * seq.num_prompt / tenant.weight
            heapq.heapreplace(heap, (served + cost, place, tenant, entries))
        return found

    def _charge_output(self, seq: Sequence) -> None:
        total = len(seq.token_ids)
        num_new = total - max(seq.num_charged, seq.num_prompt)
        if num_new > 0:
            self._charge(seq, num_new * (DECODE + RESIDENCY * total))
        seq.num_charged = total

    def _charge(self, seq: Sequence, cost: float) -> None:
        tenant = seq.group.request.tenant
        self._served[tenant] += cost / tenant.weight

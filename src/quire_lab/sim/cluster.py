"""`Cluster`: N real `EngineCore`s and the real router on one virtual clock.

A heap orders the events: arrivals, ends of steps, faults, replicas that become ready. Nothing changes between events.
Events at equal times happen in the order in which they were scheduled, so a seed replays bit for bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator
from functools import partial

from quire.clock import VirtualClock
from quire.cost.cost_model import StepTime
from quire.engine.messages import AbortRequest, Message
from quire.errors import ConfigError
from quire.executor.base import Executor
from quire.request import TokenEvent
from quire.scheduler.scheduler import Sleep
from quire_gateway.routing import Demand, Router
from quire_lab.sim.disaggregated import Handover, Linked
from quire_lab.sim.replica import ClusterConfig, Replica, Timeline
from quire_lab.sim.requests import Client, Sent
from quire_lab.workload.request import Workload, WorkloadRequest


class Cluster:
    """One simulation, run once. `quire_lab.sim.run.simulate` sets it up."""

    def __init__(
        self,
        config: ClusterConfig,
        step_time: StepTime,
        workload: Workload,
        *,
        watch: Callable[[Executor], Executor] | None = None,
    ) -> None:
        """``watch`` wraps the executor of every replica, as a test does that hashes its plans."""
        self.config = config
        self.clock = VirtualClock()
        self._step_time = step_time
        self.router = Router(config.routing, seed=config.seed, max_load_ratio=config.max_load_ratio)
        chains = self.router.needs_chains
        self.client = Client(
            workload, config.cache, config.seed, chains=chains, concurrency=config.concurrency
        )
        self.replicas: list[Replica] = []
        self.retired: list[Replica] = []  # those that died
        self.timeline = Timeline()
        self.watch = watch
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.routable: Collection[int] | None = None  # replicas that get requests; None: all
        pools = config.pools
        self.handover = (
            None
            if pools is None
            else Handover(pools, config.cache.block_size, self.at, lambda n, message: _tell(self, n, message))
        )
        self._unplaced: list[Sent] = []  # requests that arrived while no replica was alive
        self._scores = self.router.scores
        self._cancels = any(r.cancel_after_tokens is not None for r in workload.requests)

    def run(self) -> None:
        """Simulate until every request has ended.

        Raises:
            ConfigError: requests remain that no replica will ever take: all died, and none restarts.
        """
        for number in range(self.config.num_replicas):
            self.start(number)
        for request in self.client.first:
            self.at(request.arrival_s, partial(self._send, request))
        heap, advance_to = self._heap, self.clock.advance_to
        while heap:
            when, _, happen = heapq.heappop(heap)
            advance_to(when)
            happen()
        if self.client.sent:
            raise ConfigError(
                f"{len(self.client.sent)} requests are left and no replica is alive: let one restart, or add one"
            )

    def at(self, when_s: float, happen: Callable[[], None]) -> None:
        """Schedule ``happen`` at a time, after the events already scheduled for that time."""
        self._order += 1
        heapq.heappush(self._heap, (when_s, self._order, happen))

    def start(self, number: int) -> None:
        """A replica is ready: a new one, or the replacement of the dead replica ``number``."""
        replica = self._replica(number, lambda over_s: self.at(over_s, over))

        def over() -> None:
            if self.replicas[number] is replica:  # otherwise it died during the step
                self._over(replica)

        if number == len(self.replicas):
            self.replicas.append(replica)
            self.router.add_replica()
        else:
            self.replicas[number] = replica
            self.router.revive(number)
        unplaced, self._unplaced = self._unplaced, []
        for sent in unplaced:
            self.place(sent)

    def kill(self, number: int) -> None:
        """The replica's engine is gone; the router sends its requests in flight elsewhere."""
        lost = self.router.lose(number)
        self.retired.append(self.replicas[number])
        # An engine to which no request is routed takes its place until a new one is started.
        self.replicas[number] = self._replica(number, lambda over_s: None)
        for request_id in lost:
            self.place(self.client.sent[request_id])

    def _replica(self, number: int, on_submit: Callable[[float], None]) -> Replica:
        reports, watch = self.router.needs_events, _watch_of(self, number)
        return Replica(
            number, self.config, self._step_time, self.clock, on_submit, reports=reports, watch=watch
        )

    def _send(self, request: WorkloadRequest, due_s: float | None = None, num_retries: int = 0) -> None:
        """Send a request that is due now, or that was held back or rejected since ``due_s`` and may go now."""
        config, now = self.config, self.clock.now()
        if due_s is None and self.client.full:
            self.client.held.append((request, now))
            return
        sent = self.client.send(request, now, due_s)
        sent.num_retries = num_retries
        way_s = config.request_s + config.per_prompt_token_s * request.num_prompt_tokens
        if way_s:
            self.at(now + way_s, lambda: self.place(sent))
        else:
            self.place(sent)

    def place(self, sent: Sent) -> None:
        """Route a request and hand it to the replica, which takes it from its inbox at the next turn of its loop."""
        request_id = sent.request.request_id
        demand = Demand(sent.chain, len(sent.request.prompt_token_ids), sent.request.sampling.max_tokens or 0)
        request, routable = self.client.resumed(sent) if sent.token_times else sent.request, self.routable
        if self.handover is not None:
            request, routable = self.handover.part(sent, request)
        sent.replica, sent.placed_s = self.router.route(request_id, demand, routable), self.clock.now()
        if sent.replica is None:
            self._unplaced.append(sent)
            return
        if self.handover is not None and sent.token_times:
            _tell(self, sent.replica, request, self.handover.load(sent))
        else:
            _tell(self, sent.replica, request)

    def _begin(self, replica: Replica) -> None:
        """Run one turn of the replica's loop."""
        self._take(replica, replica.core.begin())
        if isinstance(rest := replica.core.rest, Sleep):
            self.wake(replica, rest.until_s)

    def wake(self, replica: Replica, when_s: float) -> None:
        """Let an idle replica's loop turn at ``when_s``, unless another event does so earlier."""

        def wake() -> None:
            if not replica.waits and self.replicas[replica.number] is replica:
                self._begin(replica)

        self.at(when_s, wake)

    def _over(self, replica: Replica) -> None:
        """The oldest step of a replica is over: apply it, then run the next turn of its loop."""
        self._take(replica, replica.core.finish())
        self._begin(replica)
        now = self.clock.now()
        if now >= self.timeline.next_s:
            self.timeline.sample(now, self.replicas)

    def _take(self, replica: Replica, events: list[TokenEvent]) -> None:
        """Show the events of a step to the client. This is the simulator's own hot loop."""
        if not events:
            return
        now = self.clock.now()
        sent, watched = self.client.sent, self._scores or self._cancels
        marks = {} if watched else self.client.marks
        for event in events:
            if event[4] is None and event[2] and (mark := marks.get(event[0])) is not None:
                for _ in event[2]:
                    mark(now)
                continue
            request = sent.get(event[0])
            if request is None:  # the client has left
                continue
            if event[2]:
                request.token_times += [now] * len(event[2])
            if event[4] is not None:
                self.router.finished(event.request_id)
                if self.handover is not None and self.handover.continues(request, event, replica.number):
                    self.place(request)
                    continue
                if event.retry_after_s and request.num_retries < self.config.retries:
                    self.client.take_out(event.request_id)
                    again = partial(self._send, request.source, request.due_s, request.num_retries + 1)
                    self.at(now + event.retry_after_s, again)
                    continue
                self._follow(self.client.ended(event, now))
            elif watched:
                self._look(request, now)
        if self.router.needs_events:
            self._report(replica)

    def _look(self, sent: Sent, now: float) -> None:
        request_id, num_tokens = sent.request.request_id, len(sent.token_times)
        if num_tokens == 1:
            self.router.started(request_id, now - sent.placed_s)
        if num_tokens == sent.source.cancel_after_tokens:
            assert sent.replica is not None
            self.replicas[sent.replica].core.put(AbortRequest(request_id))
            self.router.finished(request_id)
            self._follow(self.client.left(request_id, now))

    def _follow(self, turns: Iterator[tuple[WorkloadRequest, float]]) -> None:
        for request, due_s in turns:
            self.at(due_s, partial(self._send, request))
        while self.client.held and not self.client.full:
            self._send(*self.client.held.popleft())

    def _report(self, replica: Replica) -> None:
        scheduler = replica.core.scheduler
        assert scheduler.cache_events is not None
        if not self.router.prefixes.report(replica.number, scheduler.cache_events.drain()):
            self.router.prefixes.replace_report(replica.number, scheduler.cache.prefix.snapshot())


def _tell(cluster: Cluster, number: int, *messages: Message) -> None:
    """Put messages into a replica's inbox; an idle one turns after all others of this very moment are there."""
    replica = cluster.replicas[number]
    for message in messages:
        replica.core.put(message)
    if not replica.waits:
        cluster.wake(replica, cluster.clock.now())


def _watch_of(cluster: Cluster, number: int) -> Callable[[Executor], Executor] | None:
    """Return what wraps the executor of a replica."""
    watch, handover = cluster.watch, cluster.handover
    if handover is None:
        return watch

    def wrap(executor: Executor) -> Executor:
        inner = watch(executor) if watch is not None else executor
        return Linked(inner, lambda transfer: handover.began(number, transfer, cluster.clock.now()))

    return wrap

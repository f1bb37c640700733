"""Planted faults in replicas that die, hang or load: retries, breakers, fallbacks."""

from __future__ import annotations

from mutant import Mutant

RETRYING = "tests/gateway/test_retrying.py::"
REPLICAS = "tests/cli/test_replicas.py::"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "death-paid-from-the-retry-budget",
        "a request whose backend died before the first byte is charged for going elsewhere",
        "src/quire/gateway/retrying.py",
        "        exchange.restart()\n        if error.tells_of_death:\n",
        "        exchange.restart()\n        if False:\n",
        (RETRYING + "test_requests_at_a_dead_backend_cost_no_retries",),
    ),
    Mutant(
        "tried-by-backend",
        "what was tried is a backend, whatever the model",
        "src/quire/gateway/fleet.py",
        "if (b.life, model) not in tried",
        "if b.life not in {life for life, _ in tried}",
        (RETRYING + "test_what_was_tried_is_a_model_at_a_backend",),
    ),
    Mutant(
        "breaker-counts-429",
        "a backend that has no room counts as one that fails",
        "src/quire/gateway/upstream.py",
        "self.answer.status >= 500 and not self.tells_of_load",
        "self.answer.status >= 429",
        (RETRYING + "test_breakers_count_what_a_backend_does_wrong",),
    ),
    Mutant(
        "back-off-never-falls",
        "restarts of long ago count for ever",
        "src/quire/engine/restarts.py",
        "now_s - self._times_s[0] > self._window_s",
        "False",
        ("tests/engine/test_restarts.py",),
    ),
    Mutant(
        "hung-backend-keeps-its-requests",
        "requests that wait at a backend without an answer to polls stay there",
        "src/quire/gateway/fleet.py",
        "        if backend.is_lost:\n",
        "        if False:\n",
        (RETRYING + "test_polls_tell_who_watches_a_lost_backend",),
    ),
    Mutant(
        "moved-request-billed-twice",
        "what a first attempt said of its tokens is billed with the answer of the second",
        "src/quire/gateway/exchange.py",
        "        self.usage, self.first_s = Usage(), None\n",
        "        self.first_s = None\n",
        (RETRYING + "test_events_of_a_first_attempt_are_not_billed",),
    ),
    Mutant(
        "fallback-paid-from-the-budget",
        "a fallback needs a retry from the budget",
        "src/quire/gateway/placing.py",
        "(model not in exchange.owed or self._pays(exchange, model))",
        "(not exchange.owed or self._pays(exchange, model))",
        (RETRYING + "test_a_fallback_is_not_paid_for",),
    ),
    Mutant(
        "second-attempt-is-free",
        "another attempt at the model that failed costs nothing",
        "src/quire/gateway/retries.py",
        "exchange.failures[model] < args.attempts and budget.take()",
        "exchange.failures[model] < args.attempts",
        ("tests/gateway/test_proxy.py::test_retries_stay_within_their_budget",),
    ),
    Mutant(
        "draining-replica-loses-its-requests",
        "requests are withdrawn from a replica that ends them before it stops",
        "src/quire/gateway/health.py",
        "is_lost=not failure.is_leaving",
        "is_lost=True",
        (RETRYING + "test_requests_stay_where_a_replica_drains",),
    ),
    Mutant(
        "gateways-own-silence-moves-requests",
        "a backend counts as better though it has not answered since the silence began",
        "src/quire/gateway/placing.py",
        "and (b.answered_s >= lost.missed_s or not lost.is_silent)",
        "and True",
        (RETRYING + "test_requests_stay_where_no_replica_is_better",),
    ),
    Mutant(
        "old-life-is-remembered",
        "a backend that has started again is not tried again",
        "src/quire/gateway/fleet.py",
        "        if ready:\n            self._begin_life(backend)\n",
        "",
        (RETRYING + "test_a_backend_in_a_new_life_may_be_tried_again",),
    ),
    Mutant(
        "death-while-loading-ends-the-server",
        "a replica that dies more than max_restarts times ends the server though another one serves",
        "src/quire/cli/replicas.py",
        "if is_served or (self._has_served and self._children):",
        "if False:",
        (REPLICAS + "test_deaths_while_loading_are_not_the_end",),
    ),
    Mutant(
        "dead-replica-stays-in-the-fleet",
        "a replica whose process has ended gets requests until its heartbeats are missed",
        "src/quire/cli/replicas.py",
        "                state.discovery.deregister(backend.name)\n",
        "",
        (REPLICAS + "test_a_dead_replica_gets_nothing_from_that_moment",),
    ),
    Mutant(
        "breaker-of-a-dead-process",
        "a replica that was started again is shut out for the failures of the process that died",
        "src/quire/gateway/fleet.py",
        "            if backend.has_died:\n                backend.breaker.close(now)\n",
        "",
        ("tests/gateway/test_health.py::test_the_failures_of_a_dead_process_are_not_its_heirs",),
    ),
    Mutant(
        "queue-opens-a-breaker",
        "a first token that waited behind others counts as late",
        "src/quire/gateway/placing.py",
        "placed.is_late = placed.is_first and ",
        "placed.is_late = ",
        (RETRYING + "test_a_long_queue_opens_no_breaker",),
    ),
    Mutant(
        "prefix-lost-over-one-request",
        "one running request takes its prefix away from a replica",
        "src/quire/gateway/routing.py",
        "_SLACK = 1  #",
        "_SLACK = 0  #",
        ("tests/gateway/test_routing.py::test_one_running_request_takes_no_prefix_away",),
    ),
)

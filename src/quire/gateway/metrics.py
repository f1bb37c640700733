"""The gateway's metrics for Prometheus, under Envoy's and the vLLM router's names where they mean the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from quire.gateway.exchange import Exchange
from quire.gateway.filters import Filters
from quire.gateway.fleet import Fleet
from quire.gateway.retries import RetryBudget
from quire.metrics.engine_stats import Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class GatewayMetrics:
    """Counted by request; the gauges are read from the fleet at each scrape."""

    def __init__(self, fleet: Fleet, budget: RetryBudget) -> None:
        self._fleet = fleet
        self._budget = budget
        self.requests: Counter[tuple[str, str, str]] = Counter()  # (path, status, outcome)
        self.answers: Counter[tuple[str, str]] = Counter()  # (backend, status)
        self.failures: Counter[tuple[str, str]] = Counter()  # (backend, kind of failure)
        self.migrations: Counter[tuple[str]] = Counter()  # (backend that went on,)
        self.tokens: Counter[tuple[str, str, str]] = Counter()  # (backend, model, prompt | cached | output)
        self.filters: Filters | None = None
        self._ttft: dict[str, Histogram] = defaultdict(lambda: Histogram(_SECONDS))
        self._total: dict[str, Histogram] = defaultdict(lambda: Histogram(_SECONDS))
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)  # a collector is any object with collect()
        ProcessCollector(registry=self.registry)

    def ended(self, exchange: Exchange, now: float) -> None:
        """Count a request."""
        self.requests[exchange.path, str(exchange.status), exchange.outcome] += 1
        backend, target, usage = exchange.backend, exchange.target, exchange.usage
        if backend is None or target is None:
            return
        self.answers[backend.name, str(exchange.status)] += 1
        self._total[backend.name].observe(now - exchange.arrival_s)
        if exchange.first_s is not None:
            self._ttft[backend.name].observe(exchange.first_s - exchange.arrival_s)
        for kind in ("prompt", "cached", "output"):
            self.tokens[backend.name, target.model, kind] += getattr(usage, f"{kind}_tokens") or 0

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return (body, content type) of /metrics for an Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield every family; prometheus-client calls this at each scrape."""
        yield _counter("quire:gateway_requests", "Requests by path, status and outcome.",
                       ("path", "status", "outcome"), self.requests)  # fmt: skip
        yield _counter("envoy_cluster_upstream_rq", "Requests by the backend that answered, and status.",
                       ("backend", "envoy_response_code"), self.answers)  # fmt: skip
        yield _counter("quire:gateway_attempt_failures", "Failed attempts by backend and kind.",
                       ("backend", "kind"), self.failures)  # fmt: skip
        yield _counter("quire:gateway_migrations", "Streams that a backend continued for another one.",
                       ("backend",), self.migrations)  # fmt: skip
        yield _counter("quire:gateway_tokens", "Tokens by backend, model and kind, as answers say.",
                       ("backend", "model", "kind"), self.tokens)  # fmt: skip
        if self.filters is not None:
            yield _counter("quire:gateway_filter_verdicts", "Verdicts by filter, before or after the model.",
                           ("filter", "when", "verdict"), self.filters.counts)  # fmt: skip
        retries = {(): self._budget.num_taken}
        yield _counter("envoy_cluster_upstream_rq_retry", "Retries.", (), retries)
        refused = {(): self._budget.num_refused}
        yield _counter("envoy_cluster_upstream_rq_retry_overflow", "Retries beyond the budget.", (), refused)
        ejections = {(b.name,): b.breaker.num_ejections for b in self._fleet}
        yield _counter("envoy_cluster_outlier_detection_ejections_enforced_total", "Openings of breakers.",
                       ("backend",), ejections)  # fmt: skip
        yield _histogram("quire:gateway_time_to_first_token_seconds", "Arrival to first frame.", self._ttft)
        yield _histogram("quire:gateway_request_seconds", "Arrival to end.", self._total)
        healthy = GaugeMetricFamily("vllm:healthy_pods_total", "1: ready.", labels=["server"])
        running = GaugeMetricFamily("vllm:num_requests_running", "Requests in flight.", labels=["server"])
        for backend in self._fleet:
            healthy.add_metric([backend.name], float(backend.is_ready))
            running.add_metric([backend.name], self._fleet.router.loads[backend.number].requests)
        yield healthy
        yield running


def _counter(name: str, text: str, labels: tuple[str, ...], counts: Mapping[Any, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in sorted(counts.items()):
        family.add_metric(values, count)
    return family


def _histogram(name: str, text: str, histograms: dict[str, Histogram]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=["backend"])
    for backend, histogram in sorted(histograms.items()):
        family.add_metric([backend], histogram.cumulative(), histogram.total)
    return family

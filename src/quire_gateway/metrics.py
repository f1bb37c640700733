"""The gateway's metrics for Prometheus, under Envoy's and the vLLM router's names where they mean the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from quire.metrics.engine_stats import Histogram
from quire.slo import Slo
from quire_gateway.exchange import Exchange
from quire_gateway.fleet import Fleet
from quire_gateway.retries import RetryBudget
from quire_gateway.stage import Stage, families
from quire_gateway.used import meets

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

MAX_TENANTS = 200
_OF_TENANTS = {"tenant", "key"}  # labels
_ENVOY_FAILURES = (
    ("envoy_cluster_upstream_rq_timeout", "timeout", "Attempts that timed out."),
    ("envoy_cluster_upstream_cx_connect_fail", "connect", "Attempts without a connection."),
    ("envoy_cluster_upstream_rq_rx_reset", "broken", "Attempts whose connection ended early."),
)


class GatewayMetrics(Stage):
    """Counted by request; the gauges are read from the fleet at each scrape."""

    def __init__(self, fleet: Fleet, budget: RetryBudget, slo: Slo | None = None) -> None:
        """``slo``: the latencies of an answer that counts as goodput; None: no answer does."""
        self._fleet = fleet
        self._budget = budget
        self._slo = slo
        self.stages: Sequence[Stage] = ()  # whose families are told too
        self.requests: Counter[tuple[str, str, str]] = Counter()  # (path, status, outcome)
        self.answers: Counter[tuple[str, str]] = Counter()  # (backend, status)
        self.failures: Counter[tuple[str, str]] = Counter()  # (backend, kind of failure)
        self.migrations: Counter[tuple[str]] = Counter()  # (backend that went on,)
        self.tokens: Counter[tuple[str, str, str]] = Counter()  # (backend, model, prompt | cached | output)
        self.tenants: Counter[tuple[str, str]] = Counter()  # (tenant, outcome)
        self.tenant_tokens: Counter[tuple[str, str]] = Counter()  # (tenant, prompt | cached | output)
        self.engine_s: dict[str, float] = defaultdict(float)  # by tenant
        self.kv_block_s: dict[str, float] = defaultdict(float)
        self.goodput: Counter[tuple[str, str]] = Counter()  # (tenant, key)
        self._tenants: set[str] = set()
        self._ttft: dict[str, Histogram] = defaultdict(lambda: Histogram(_SECONDS))
        self._total: dict[str, Histogram] = defaultdict(lambda: Histogram(_SECONDS))
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)  # a collector is any object with collect()
        self._without_tenants = CollectorRegistry(auto_describe=False)
        self._without_tenants.register(_WithoutTenants(self))
        for registry in (self.registry, self._without_tenants):
            ProcessCollector(registry=registry)

    async def after(self, exchange: Exchange, now: float) -> None:
        """Count a request."""
        answer = exchange.answer
        self.requests[exchange.path, str(answer.status), exchange.outcome] += 1
        tenant = self._tenant(exchange.tenant)
        self.tenants[tenant, "limited" if answer.status == 429 else exchange.outcome] += 1
        backend, target, usage = exchange.backend, exchange.target, exchange.usage
        if backend is None or target is None:
            return
        self.answers[backend.name, str(answer.status)] += 1
        self._total[backend.name].observe(now - exchange.arrival_s)
        if answer.first_s is not None:
            self._ttft[backend.name].observe(answer.first_s - exchange.arrival_s)
        for kind in ("prompt", "cached", "output"):
            num = getattr(usage, f"{kind}_tokens") or 0
            self.tokens[backend.name, target.model, kind] += num
            self.tenant_tokens[tenant, kind] += num
        self.engine_s[tenant] += usage.engine_s
        self.kv_block_s[tenant] += usage.kv_block_s
        met_slo = self._slo is not None and meets(self._slo, exchange, now)
        self.goodput[tenant, self._key(tenant, exchange.key)] += met_slo

    def _tenant(self, name: str) -> str:
        """Return the label of a tenant: the first `MAX_TENANTS` have their own."""
        if name in self._tenants:
            return name
        if len(self._tenants) >= MAX_TENANTS:
            return "other"
        self._tenants.add(name)
        return name

    def _key(self, tenant: str, name: str) -> str:
        """Return the label of a key: the first `MAX_TENANTS` of them have their own."""
        return name if (tenant, name) in self.goodput or len(self.goodput) < MAX_TENANTS else "other"

    def exposition(self, accept: str, *, with_tenants: bool = True) -> tuple[bytes, str]:
        """Return (body, content type) of /metrics for an Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry if with_tenants else self._without_tenants), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield every family; prometheus-client calls this at each scrape."""
        yield counter("quire:gateway_requests", "Requests by path, status and outcome.",
                       ("path", "status", "outcome"), self.requests)  # fmt: skip
        yield counter("envoy_cluster_upstream_rq", "Requests by the backend that answered, and status.",
                       ("backend", "envoy_response_code"), self.answers)  # fmt: skip
        yield counter("quire:gateway_attempt_failures", "Failed attempts by backend and kind.",
                       ("backend", "kind"), self.failures)  # fmt: skip
        yield counter("quire:gateway_migrations", "Streams that a backend continued for another one.",
                       ("backend",), self.migrations)  # fmt: skip
        yield counter("quire:gateway_tokens", "Tokens by backend, model and kind, as answers say.",
                       ("backend", "model", "kind"), self.tokens)  # fmt: skip
        yield counter("quire:gateway_tenant_requests", "Requests by tenant and outcome; limited: status 429.",
                       ("tenant", "outcome"), self.tenants)  # fmt: skip
        yield counter("quire:gateway_tenant_tokens", "Tokens by tenant and kind, as answers say.",
                       ("tenant", "kind"), self.tenant_tokens)  # fmt: skip
        yield counter("quire:gateway_tenant_slo_met", "Answers within every latency of slo, by tenant and key.",
                       ("tenant", "key"), self.goodput)  # fmt: skip
        yield counter("quire:gateway_tenant_engine_seconds", "Engine time by tenant, as replicas of Quire say.",
                       ("tenant",), {(name,): value for name, value in self.engine_s.items()})  # fmt: skip
        yield counter("quire:gateway_tenant_kv_block_seconds", "KV blocks held, times seconds, by tenant.",
                       ("tenant",), {(name,): value for name, value in self.kv_block_s.items()})  # fmt: skip
        for name, kind, text in _ENVOY_FAILURES:
            counts = {(backend,): n for (backend, failure), n in self.failures.items() if failure == kind}
            yield counter(name, text, ("backend",), counts)
        yield from families(self.stages)
        retries = {(): self._budget.num_taken}
        yield counter("envoy_cluster_upstream_rq_retry", "Retries.", (), retries)
        refused = {(): self._budget.num_refused}
        yield counter("envoy_cluster_upstream_rq_retry_overflow", "Retries beyond the budget.", (), refused)
        ejections = {(b.name,): b.breaker.num_ejections for b in self._fleet}
        yield counter("envoy_cluster_outlier_detection_ejections_enforced_total", "Openings of breakers.",
                       ("backend",), ejections)  # fmt: skip
        yield _histogram("quire:gateway_time_to_first_token_seconds", "Arrival to first frame.", self._ttft)
        yield _histogram("quire:gateway_request_seconds", "Arrival to end.", self._total)
        yield from self._gauges()

    def _gauges(self) -> Iterator[Metric]:
        """Yield what is so now, by backend and by model."""
        loads, backends = self._fleet.router.loads, list(self._fleet)
        yield _gauge("vllm:healthy_pods_total", "1: ready.", "server",
                     {b.name: float(b.is_ready) for b in backends})  # fmt: skip
        for name, label in (
            ("vllm:num_requests_running", "server"),
            ("envoy_cluster_upstream_rq_active", "backend"),
        ):
            yield _gauge(
                name, "Requests in flight.", label, {b.name: loads[b.number].requests for b in backends}
            )
        yield _gauge("vllm:num_prefill_requests", "Requests in flight without a first token.", "server",
                     {b.name: loads[b.number].pending for b in backends})  # fmt: skip
        yield _gauge("vllm:num_decoding_requests", "Requests in flight with a first token.", "server",
                     {b.name: loads[b.number].requests - loads[b.number].pending for b in backends})  # fmt: skip
        serving = {model: self._fleet.serving(model) for model in self._fleet.models}
        yield _gauge("envoy_cluster_membership_total", "Backends by model.", "envoy_cluster_name",
                     {model: len(members) for model, members in serving.items()})  # fmt: skip
        yield _gauge("envoy_cluster_membership_healthy", "Ready backends by model.", "envoy_cluster_name",
                     {model: sum(b.is_ready for b in members) for model, members in serving.items()})  # fmt: skip


class _WithoutTenants:
    """The families of no tenant."""

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for family in self._metrics.collect():
            if not any(_OF_TENANTS & sample.labels.keys() for sample in family.samples):
                yield family


def counter(
    name: str, text: str, labels: tuple[str, ...], counts: Mapping[Any, float]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in sorted(counts.items()):
        family.add_metric(values, count)
    return family


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _histogram(name: str, text: str, histograms: dict[str, Histogram]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=["backend"])
    for backend, histogram in sorted(histograms.items()):
        family.add_metric([backend], histogram.cumulative(), histogram.total)
    return family

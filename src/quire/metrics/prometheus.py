"""The metrics of /metrics: vLLM's names if a metric means the same, ``quire:`` for the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from quire.metrics.engine_stats import STEP_TOKENS, EngineStats, RankStats, cumulative
from quire.metrics.server import TABLE, ServerMetrics

# name → (help, attribute of `EngineStats`)
_ENGINE_GAUGES: dict[str, tuple[str, str]] = TABLE["engine_gauges"]
_ENGINE_COUNTERS: dict[str, tuple[str, str]] = TABLE["engine_counters"]


class Exposition:
    """Prometheus' families of one app's numbers, in a registry of its own."""

    def __init__(self, server: ServerMetrics) -> None:
        self._server = server
        self._labels = ["model_name", "engine"]
        self._values = [server.model_name, "0"]
        self._registry = CollectorRegistry(auto_describe=False)
        # A collector is any object with `collect`.
        self._registry.register(self)
        # CPU, memory and files of the API process.
        ProcessCollector(registry=self._registry)

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """Return (body, content type) of /metrics for an Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield every family; prometheus-client calls this at each scrape."""
        server = self._server
        for name, (text, _) in TABLE["histograms"].items():
            histogram = server.histograms[name]
            family = HistogramMetricFamily(name, text, labels=self._labels)
            family.add_metric(self._values, histogram.cumulative(), histogram.total)
            yield family
        for name, text in TABLE["counters"].items():
            yield self._counter(name, text, server.counters[name])
        yield from self._labelled()
        stats = server.engine()
        yield from self._of_engine(stats)
        if stats.tiers:
            yield from self._of_tiers(stats.tiers)
        for name, (text, attribute) in _ENGINE_GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=self._labels)
            gauge.add_metric(self._values, getattr(stats, attribute))
            yield gauge
        for name, (text, attribute) in _ENGINE_COUNTERS.items():
            yield self._counter(name, text, getattr(stats, attribute))

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=self._labels)
        family.add_metric(self._values, value)
        return family

    def _of_engine(self, stats: EngineStats) -> Iterator[Metric]:
        """Yield the histogram of step sizes, accepted drafts by position and the configuration of the cache."""
        steps = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=self._labels)
        steps.add_metric(
            self._values, cumulative(STEP_TOKENS, stats.step_tokens), float(stats.num_computed_tokens)
        )
        yield steps
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts accepted, by their position.",
            labels=[*self._labels, "position"],
        )
        for position, count in enumerate(stats.accepted_at or (0,)):
            accepted.add_metric([*self._values, str(position)], count)
        yield accepted
        yield from self._of_ranks(stats.ranks)
        config = {name: str(value) for name, value in self._server.cache_config().items()}
        info = GaugeMetricFamily("vllm:cache_config_info", "What the KV cache was built with.",
                                 labels=[*self._labels, *config])  # fmt: skip
        if config:
            info.add_metric([*self._values, *config.values()], 1.0)
        yield info

    def _of_ranks(self, ranks: RankStats) -> Iterator[Metric]:
        if not ranks.busy_s:
            return
        yield self._counter("quire:ranks_out_seconds", "Time in which a step was out.", ranks.out_s)
        bubbles = GaugeMetricFamily(
            "quire:ranks_idle_ratio",
            "Share of the ranks' time, while a step was out, in which they waited.",
            labels=self._labels,
        )
        bubbles.add_metric(self._values, ranks.bubbles)
        yield bubbles
        counters = {
            "quire:rank_busy_seconds": ("Time in which a rank computed.", ranks.busy_s),
            "quire:rank_bytes_sent": ("Bytes from a rank to the others.", ranks.bytes_sent),
        }
        gauges = {
            "quire:rank_weight_bytes": ("Weights of a rank.", [about.weight_bytes for about in ranks.about]),
            "quire:rank_peak_memory_bytes": ("Resident memory of a rank at its largest.", ranks.peak_bytes),
        }
        for kind, table in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
            for name, (text, values) in table.items():
                family = kind(name, text, labels=[*self._labels, "rank"])
                for rank, value in enumerate(values):
                    family.add_metric([*self._values, str(rank)], value)
                yield family
        names = ("rank", "host", "pid", "stage", "cores", "steps")
        info = GaugeMetricFamily("quire:rank_info", "Where a rank runs.", labels=[*self._labels, *names])
        for rank, at in enumerate(ranks.about):
            steps = "recorded" if at.replays else "call by call"
            labels = map(str, (rank, at.host, at.pid, at.stage, at.num_cores, steps))
            info.add_metric([*self._values, *labels], 1.0)
        yield info
        if ranks.experts:
            yield from self._of_experts(ranks)

    def _of_experts(self, ranks: RankStats) -> Iterator[Metric]:
        yield self._counter("quire:experts_moved", "Experts moved between ranks.", ranks.num_moved)
        for name, (text, attribute) in TABLE["expert_gauges"].items():
            gauge = GaugeMetricFamily(name, text, labels=[*self._labels, "layer"])
            for load in ranks.experts:
                gauge.add_metric([*self._values, str(load.layer)], getattr(load, attribute))
            yield gauge

    def _of_tiers(self, tiers: Mapping[str, Mapping[str, int]]) -> Iterator[Metric]:
        for kind, table in ((CounterMetricFamily, "tier_counters"), (GaugeMetricFamily, "tier_gauges")):
            for name, (text, attribute) in TABLE[table].items():
                family = kind(name, text, labels=[*self._labels, "tier"])
                for tier, counts in tiers.items():
                    family.add_metric([*self._values, tier], counts[attribute])
                yield family

    def _labelled(self) -> Iterator[Metric]:
        success = CounterMetricFamily(
            "vllm:request_success", "Sequences by how they ended.", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in self._server.finished.items():
            success.add_metric([*self._values, reason], count)
        yield success
        answers = CounterMetricFamily(
            "quire:http_responses", "HTTP answers by route and status.", labels=["path", "status"]
        )
        for (path, status), count in sorted(self._server.responses.items()):
            answers.add_metric([path, status], count)
        yield answers

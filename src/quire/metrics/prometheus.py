"""The metrics of /metrics: vLLM's names if a metric means the same, ``quire:`` for the others.

`ServerMetrics` belongs to one app and has its own registry. A request's numbers go through `RequestMetrics`, which is
called once per chunk with times from the caller. Numbers are plain Python until a scrape turns them into Prometheus'
families.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from importlib.resources import files
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from quire.metrics.engine_stats import STEP_TOKENS, EngineStats, Histogram, RankStats, cumulative
from quire.metrics.trace import RequestPhases

_TABLE: dict[str, Any] = tomllib.loads((files("quire.metrics") / "metrics.toml").read_text())
_BOUNDS: dict[str, Sequence[float]] = _TABLE["bounds"]
_HISTOGRAMS: dict[str, tuple[str, str]] = _TABLE["histograms"]  # name → (help, of `_BOUNDS`)
_COUNTERS: dict[str, str] = _TABLE["counters"]
# name → (help, attribute of `EngineStats`)
_ENGINE_GAUGES: dict[str, tuple[str, str]] = _TABLE["engine_gauges"]
_ENGINE_COUNTERS: dict[str, tuple[str, str]] = _TABLE["engine_counters"]
MeetsSlo = Callable[
    [float | None, float | None, float | None], bool
]  # (TTFT, TPOT, E2EL in seconds; None: not defined)


class ServerMetrics:
    """All metrics of one app. ``engine`` returns the engine's numbers at each scrape."""

    def __init__(
        self,
        model_name: str,
        engine: Callable[[], EngineStats],
        cache_config: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        self._labels = ["model_name", "engine"]
        self._values = [model_name, "0"]
        self._engine = engine
        self._cache_config = cache_config
        self.histograms = {name: Histogram(_BOUNDS[bounds]) for name, (_, bounds) in _HISTOGRAMS.items()}
        self.counters: Counter[str] = Counter(dict.fromkeys(_COUNTERS, 0))
        self.meets_slo: MeetsSlo | None = None  # with --slo
        self.finished: Counter[str] = Counter(
            dict.fromkeys(("stop", "length", "abort", "deadline", "error"), 0)
        )
        self.responses: Counter[tuple[str, str]] = Counter()  # (path, status)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)  # a collector is any object with collect()
        ProcessCollector(registry=self.registry)  # CPU, memory and files of the API process

    def request(
        self,
        arrival_s: float,
        *,
        n: int,
        max_tokens: int | None,
        prompt_tokens: int,
        on_end: Callable[[RequestPhases], None] | None = None,
    ) -> RequestMetrics:
        """Count an accepted request (one prompt) and return the object to which its stream reports.

        ``on_end`` is called with the request's times when its last sequence ends.
        """
        self.counters["vllm:prompt_tokens"] += prompt_tokens
        self.histograms["vllm:request_prompt_tokens"].observe(prompt_tokens)
        self.histograms["vllm:request_params_n"].observe(n)
        if max_tokens is not None:
            self.histograms["vllm:request_params_max_tokens"].observe(max_tokens)
        return RequestMetrics(self, arrival_s, n, prompt_tokens, on_end)

    def response(self, path: str, status: int) -> None:
        """Count an HTTP answer. ``path`` is a route, never a path that a client made up."""
        self.responses[path, str(status)] += 1

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return (body, content type) of /metrics for an Accept header."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Yield every family; prometheus-client calls this at each scrape."""
        for name, (text, _) in _HISTOGRAMS.items():
            histogram = self.histograms[name]
            family = HistogramMetricFamily(name, text, labels=self._labels)
            family.add_metric(self._values, histogram.cumulative(), histogram.total)
            yield family
        for name, text in _COUNTERS.items():
            yield self._counter(name, text, self.counters[name])
        yield from self._labelled()
        stats = self._engine()
        yield from self._of_engine(stats)
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
        config = {name: str(value) for name, value in self._cache_config().items()}
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
            "quire:rank_weight_bytes": ("Weights of a rank.", [each.weight_bytes for each in ranks.about]),
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
        for name, (text, attribute) in _TABLE["expert_gauges"].items():
            gauge = GaugeMetricFamily(name, text, labels=[*self._labels, "layer"])
            for load in ranks.experts:
                gauge.add_metric([*self._values, str(load.layer)], getattr(load, attribute))
            yield gauge

    def _labelled(self) -> Iterator[Metric]:
        success = CounterMetricFamily(
            "vllm:request_success", "Sequences by how they ended.", labels=[*self._labels, "finished_reason"]
        )
        for reason, count in self.finished.items():
            success.add_metric([*self._values, reason], count)
        yield success
        answers = CounterMetricFamily(
            "quire:http_responses", "HTTP answers by route and status.", labels=["path", "status"]
        )
        for (path, status), count in sorted(self.responses.items()):
            answers.add_metric([path, status], count)
        yield answers


@dataclass(slots=True, eq=False)
class RequestMetrics:
    """The numbers of one request's stream; called once per chunk."""

    _server: ServerMetrics
    _arrival_s: float
    n: InitVar[int]
    _prompt_tokens: int
    _on_end: Callable[[RequestPhases], None] | None
    is_admitted: bool = False
    _admitted_s: float = 0.0
    _num_cached: int = 0
    _num_preemptions: int = 0
    _reasons: list[str] = field(default_factory=list)
    # By sequence.
    _first_s: list[float] = field(init=False)
    _last_s: list[float] = field(init=False)
    _tokens: list[int] = field(init=False)
    _open: set[int] = field(init=False)

    def __post_init__(self, n: int) -> None:
        self._admitted_s = self._arrival_s
        self._first_s, self._last_s, self._tokens = [0.0] * n, [0.0] * n, [0] * n
        self._open = set(range(n))

    def chunk(self, index: int, num_tokens: int, now_s: float) -> None:
        """Count ``num_tokens`` that sequence ``index`` got at ``now_s``; they share the gap since the last chunk."""
        if num_tokens == 0:
            return
        server = self._server
        server.counters["vllm:generation_tokens"] += num_tokens
        if self._tokens[index] == 0:
            self._first_s[index] = now_s
            server.histograms["vllm:time_to_first_token_seconds"].observe(now_s - self._arrival_s)
        else:
            gap_s = (now_s - self._last_s[index]) / num_tokens
            server.histograms["vllm:inter_token_latency_seconds"].observe(gap_s, num_tokens)
        self._last_s[index] = now_s
        self._tokens[index] += num_tokens

    def finish(self, index: int, reason: str, now_s: float, num_preemptions: int = 0) -> None:
        """Count the end of sequence ``index``; the last one ends the request. A second call has no effect.

        ``num_preemptions``: total of the request so far.
        """
        if index not in self._open:
            return
        self._num_preemptions = max(self._num_preemptions, num_preemptions)
        self._open.discard(index)
        server, tokens = self._server, self._tokens[index]
        server.finished[reason] += 1
        self._reasons.append(reason)
        server.histograms["vllm:request_generation_tokens"].observe(tokens)
        mean_s: float | None = None
        if tokens > 1:
            mean_s = (self._last_s[index] - self._first_s[index]) / (tokens - 1)
            server.histograms["vllm:request_time_per_output_token_seconds"].observe(mean_s)
        if server.meets_slo is not None and reason != "abort":
            ttft_s = self._first_s[index] - self._arrival_s if tokens else None
            ended = reason in ("stop", "length")
            met = ended and server.meets_slo(ttft_s, mean_s, now_s - self._arrival_s)
            server.counters["quire:slo_met" if met else "quire:slo_missed"] += 1
        if not self._open:
            self._finish_request(now_s)

    def admitted(self, queued_s: float, num_cached: int = 0) -> None:
        """Count the seconds until the first admission; ``num_cached`` prompt tokens came from the cache."""
        self._num_cached = num_cached
        self._server.counters["vllm:prompt_tokens_cached"] += num_cached
        self.is_admitted = True
        self._admitted_s = self._arrival_s + queued_s
        self._server.histograms["vllm:request_queue_time_seconds"].observe(queued_s)

    def abandon(self, now_s: float) -> None:
        """Count the open sequences as aborted: the client has disconnected."""
        for index in sorted(self._open):
            self.finish(index, "abort", now_s)

    def _finish_request(self, now_s: float) -> None:
        histograms = self._server.histograms
        histograms["vllm:e2e_request_latency_seconds"].observe(now_s - self._arrival_s)
        histograms["vllm:request_num_preemptions"].observe(self._num_preemptions)
        histograms["vllm:request_max_num_generation_tokens"].observe(max(self._tokens))
        if self.is_admitted:  # else it was rejected, or aborted while it waited
            first_s = min((t for t, n in zip(self._first_s, self._tokens, strict=True) if n), default=now_s)
            histograms["vllm:request_prefill_time_seconds"].observe(max(0.0, first_s - self._admitted_s))
            histograms["vllm:request_decode_time_seconds"].observe(now_s - first_s)
            histograms["vllm:request_inference_time_seconds"].observe(max(0.0, now_s - self._admitted_s))
            computed = self._prompt_tokens - self._num_cached
            histograms["vllm:request_prefill_kv_computed_tokens"].observe(computed)
        if self._on_end is not None:
            self._on_end(self._phases(now_s))

    def _phases(self, now_s: float) -> RequestPhases:
        started = [(first, n) for first, n in zip(self._first_s, self._tokens, strict=True) if n]
        return RequestPhases(
            arrival_s=self._arrival_s,
            admitted_s=self._admitted_s if self.is_admitted else None,
            first_s=min(started)[0] if started else None,
            end_s=now_s,
            num_prompt_tokens=self._prompt_tokens,
            num_output_tokens=sum(self._tokens),
            finish_reasons=tuple(self._reasons),
        )

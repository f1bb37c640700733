"""`ServerMetrics`: the numbers of one app, and `RequestMetrics`: those of one request, told once per chunk.

Numbers are plain Python, with times from the caller, until a scrape turns them into families of Prometheus.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from importlib.resources import files
from typing import Any

from quire.metrics.engine_stats import EngineStats, Histogram
from quire.metrics.trace import RequestPhases

# Names, help texts and bounds of all metrics.
TABLE: dict[str, Any] = tomllib.loads((files("quire.metrics") / "metrics.toml").read_text())
# (TTFT, TPOT, E2EL in seconds; None: not defined) → whether they meet it
MeetsSlo = Callable[[float | None, float | None, float | None], bool]


def histogram_bounds(name: str) -> Sequence[float]:
    """Return the bounds of a histogram's buckets."""
    bounds: Sequence[float] = TABLE["bounds"][TABLE["histograms"][name][1]]
    return bounds


class ServerMetrics:
    """The numbers of one app. ``engine`` returns the engine's at each scrape (`quire.metrics.prometheus`)."""

    def __init__(
        self,
        model_name: str,
        engine: Callable[[], EngineStats],
        cache_config: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        self.model_name = model_name
        self.engine = engine
        self.cache_config = cache_config
        self.histograms = {name: Histogram(histogram_bounds(name)) for name in TABLE["histograms"]}
        self.counters: Counter[str] = Counter(dict.fromkeys(TABLE["counters"], 0))
        self.meets_slo: MeetsSlo | None = None  # with --slo
        self.finished: Counter[str] = Counter(
            dict.fromkeys(("stop", "length", "abort", "deadline", "error"), 0)
        )
        self.responses: Counter[tuple[str, str]] = Counter()  # (path, status)

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

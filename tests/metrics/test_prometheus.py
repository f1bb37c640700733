"""Histograms and a request's numbers."""

from __future__ import annotations

import random

from prometheus_client import Histogram as Reference
from prometheus_client.registry import CollectorRegistry

from quire.metrics.engine_stats import EngineStats, Histogram
from quire.metrics.prometheus import Exposition
from quire.metrics.server import ServerMetrics
from quire.slo import Slo


def test_histogram_equals_prometheus_clients_own() -> None:
    rng = random.Random(5)
    bounds = (0.1, 0.5, 1.0, 2.0)
    ours = Histogram(bounds)
    theirs = Reference("x", "x", buckets=bounds, registry=CollectorRegistry())
    for value in [*bounds, 0.0, 5.0, *(rng.expovariate(1.0) for _ in range(200))]:
        ours.observe(value)
        theirs.observe(value)
    samples = {s.labels.get("le", s.name): s.value for s in next(iter(theirs.collect())).samples}
    for bound, count in ours.cumulative():
        assert samples[bound] == count
    assert samples["x_count"] == ours.count
    assert abs(samples["x_sum"] - ours.total) < 1e-9


def test_latencies_of_a_request_with_two_sequences() -> None:
    metrics = ServerMetrics("m", EngineStats)
    request = metrics.request(10.0, n=2, max_tokens=None, prompt_tokens=7)
    request.admitted(0.25, 3)
    request.chunk(0, 1, 10.5)
    request.chunk(0, 4, 10.9)  # four tokens in one chunk: gaps of 0.1 s
    request.chunk(0, 0, 10.95)  # text without tokens is not counted
    request.chunk(1, 1, 11.0)
    request.finish(0, "stop", 10.95, 2)
    histograms = metrics.histograms
    assert histograms["vllm:e2e_request_latency_seconds"].count == 0  # the request is not over
    request.abandon(12.0)
    request.abandon(13.0)
    assert metrics.finished == {"stop": 1, "length": 0, "abort": 1, "deadline": 0, "error": 0}
    assert histograms["vllm:e2e_request_latency_seconds"].total == 2.0
    assert histograms["vllm:time_to_first_token_seconds"].total == 1.5
    phases = [
        histograms[f"vllm:request_{p}_time_seconds"].total
        for p in ("queue", "prefill", "decode", "inference")
    ]
    assert phases == [0.25, 0.25, 1.5, 1.75]
    itl = histograms["vllm:inter_token_latency_seconds"]
    assert (itl.count, round(itl.total, 9)) == (4, 0.4)
    tpot = histograms["vllm:request_time_per_output_token_seconds"]
    assert (tpot.count, round(tpot.total, 9)) == (1, 0.1)
    assert metrics.counters["vllm:generation_tokens"] == 6
    assert metrics.counters["vllm:prompt_tokens_cached"] == 3
    totals = {name: histograms[f"vllm:request_{name}"].total for name in
              ("num_preemptions", "max_num_generation_tokens", "prefill_kv_computed_tokens")}  # fmt: skip
    assert totals == {"num_preemptions": 2, "max_num_generation_tokens": 5, "prefill_kv_computed_tokens": 4}


def test_openmetrics_is_spoken_when_asked_for() -> None:
    metrics = ServerMetrics("m", EngineStats)
    body, kind = Exposition(metrics).page("application/openmetrics-text; version=1.0.0")
    assert "openmetrics" in kind
    assert body.endswith(b"# EOF\n")
    body, kind = Exposition(metrics).page("")
    assert kind.startswith("text/plain")
    assert b"vllm:generation_tokens_total" in body


def test_sequences_within_and_beyond_an_slo() -> None:
    metrics = ServerMetrics("m", EngineStats)
    metrics.meets_slo = Slo(ttft_s=0.5, tpot_s=0.1).met
    # (first token, last token, tokens, how it ended): good; late; slow; one token; failed; its client left
    for first_s, last_s, tokens, reason in (
        (0.4, 0.7, 4, "stop"), (0.6, 0.7, 4, "stop"), (0.4, 1.4, 4, "length"), (0.4, 0.4, 1, "length"),
        (0.4, 0.5, 2, "error"), (0.1, 0.1, 1, "abort"),
    ):  # fmt: skip
        request = metrics.request(0.0, n=1, max_tokens=None, prompt_tokens=3)
        request.chunk(0, 1, first_s)
        request.chunk(0, tokens - 1, last_s)
        request.finish(0, reason, last_s)
    assert metrics.counters["quire:slo_met"] == 2
    assert metrics.counters["quire:slo_missed"] == 3

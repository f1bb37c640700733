"""`Figures`: what the rules compare, computed from a `Reading`. Times are in seconds, shares in 0…1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire_lab.diagnose.read import Metrics, Reading

# Share of the blocks; a waiting sequence does not fit into the rest, most of the time.
FULL = 0.75


class _Sample(NamedTuple):
    running: float
    waiting: float
    kv_usage: float


@dataclass(frozen=True, slots=True)
class Figures:
    """None: the server does not say."""

    model: str
    seconds: float
    requests: float  # ended requests
    prompt_tokens: float
    output_tokens: float
    # Means over the samples.
    running: float
    waiting: float
    kv_usage: float
    kv_blocks: float
    # Shares of the samples, in all of which sequences wait: the KV cache is full; every slot is taken.
    kv_full: float
    slots_full: float
    # Mean share of the slots that waiting sequences could have, and that have room in the KV cache.
    idle_slots: float
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    long_tokens: int | None  # long_prefill_token_threshold
    gate: str | None
    prefix_caching: bool | None
    preemptions: float
    recomputed: float  # share of the computed tokens that were computed before
    hit_rate: float  # share of prompt tokens in the prefix cache
    shared: float | None  # share of prompt tokens that begin like an earlier prompt
    # Share of the engine's time (of its tokens, where times are not known) that goes to prompts.
    prompt_share: float
    chunks_per_prompt: float
    chunk_tokens: float | None  # prompt tokens in a step that has any
    chunk_step_s: float | None
    decode_step_s: float | None
    ttft_s: float
    queue_s: float
    itl_s: float  # mean
    itl_p50_s: float
    itl_p99_s: float
    host_share: float | None  # share of a step's time for planning and applying
    step_s: float | None
    draft_share: float | None  # share of a step's time for drafting
    drafted: float
    accepted: float  # share of the drafts
    draft_gain: float
    computed_tokens: float
    rejected: float  # requests with 429 or 503, or refused by the engine
    deadlines: float
    slo_missed: float  # share of the sequences, with --slo
    api_cores: float  # cores used by the API process
    load_per_core: float | None


def figures(reading: Reading) -> Figures:
    """Compute the figures of a reading."""
    before, after = reading.before, reading.after
    limits, steps = _limits(reading), _Steps(reading.live)
    work = _work(before, after)
    itl = "vllm:inter_token_latency_seconds"
    if steps.prompt_share is not None:
        work["prompt_share"] = steps.prompt_share
    return Figures(
        model=str(reading.card.get("id", "")),
        seconds=reading.seconds,
        kv_blocks=after.get("quire:kv_blocks", 0.0),
        max_num_seqs=limits.get("max_num_seqs"),
        max_num_batched_tokens=limits.get("max_num_batched_tokens"),
        long_tokens=limits.get("long_prefill_token_threshold"),
        gate=limits.get("gate"),
        prefix_caching=_prefix_caching(after),
        shared=steps.shared,
        chunk_tokens=steps.chunk_tokens,
        chunk_step_s=steps.chunk_step_s,
        decode_step_s=steps.decode_step_s,
        ttft_s=_mean_of(before, after, "vllm:time_to_first_token_seconds"),
        queue_s=_mean_of(before, after, "vllm:request_queue_time_seconds"),
        itl_s=_mean_of(before, after, itl),
        itl_p50_s=quantile(before, after, itl, 0.5),
        itl_p99_s=quantile(before, after, itl, 0.99),
        host_share=steps.share("plan_s", "apply_s"),
        step_s=steps.total_s / steps.count if steps.count else None,
        draft_share=steps.share("draft_s"),
        draft_gain=after.get("quire:spec_decode_gain", 1.0),
        api_cores=_grown(before, after, "process_cpu_seconds_total") / reading.seconds,
        load_per_core=reading.load_per_core,
        **work,
        **_queue(_samples(reading), limits.get("max_num_seqs") or float("inf")),
    )


def _queue(samples: Sequence[_Sample], slots: float) -> dict[str, Any]:
    """Return the figures of what ran and waited. ``slots``: max_num_seqs."""
    queued = [sample for sample in samples if sample.waiting > 0]
    count = max(1, len(samples))
    return {
        "running": sum(sample.running for sample in samples) / count,
        "waiting": sum(sample.waiting for sample in samples) / count,
        "kv_usage": sum(sample.kv_usage for sample in samples) / count,
        "kv_full": sum(sample.kv_usage >= FULL and sample.running < slots for sample in queued) / count,
        "slots_full": sum(sample.running >= slots for sample in queued) / count,
        "idle_slots": sum(
            max(0.0, 1.0 - sample.running / min(slots, sample.running + sample.waiting))
            for sample in queued
            if sample.kv_usage < FULL
        )
        / count,
    }


def _work(before: Metrics, after: Metrics) -> dict[str, Any]:
    """Return the figures of the tokens and requests that counters tell."""

    def grown(name: str) -> float:
        return _grown(before, after, name)

    computed = grown("quire:computed_tokens_total")
    prompts, cached = grown("vllm:prompt_tokens_total"), grown("vllm:prompt_tokens_cached_total")
    output = grown("vllm:generation_tokens_total")
    drafted = grown("vllm:spec_decode_num_draft_tokens_total")
    accepted = grown("vllm:spec_decode_num_accepted_tokens_total")
    met, missed = grown("quire:slo_met_total"), grown("quire:slo_missed_total")
    preemptions = grown("vllm:num_preemptions_total")
    again = computed - (prompts - cached) - output - (drafted - accepted)
    answers = (name for name in after if name.startswith("quire:http_responses_total"))
    refused = sum(grown(name) for name in answers if name.endswith(("status=429}", "status=503}")))
    return {
        "requests": grown("vllm:e2e_request_latency_seconds_count"),
        "prompt_tokens": prompts,
        "output_tokens": output,
        "computed_tokens": computed,
        "preemptions": preemptions,
        "recomputed": max(0.0, again) / computed if computed and preemptions else 0.0,
        "hit_rate": cached / prompts if prompts else 0.0,
        "prompt_share": max(0.0, computed - output) / computed if computed else 0.0,
        "chunks_per_prompt": grown("quire:prompt_chunks_total")
        / max(1.0, grown("vllm:request_prompt_tokens_count")),
        "drafted": drafted,
        "accepted": accepted / drafted if drafted else 0.0,
        "rejected": max(refused, grown("quire:requests_refused_total")),
        "deadlines": grown("quire:deadlines_missed_total"),
        "slo_missed": missed / (met + missed) if met + missed else 0.0,
    }


class _Steps:
    """The steps of the live feed."""

    def __init__(self, live: Sequence[dict[str, Any]]) -> None:
        self._sums: dict[str, float] = {}
        timed: dict[tuple[float, float], int] = {}  # start and end of a step with prompt tokens → how many
        for message in live:
            for name, value in message["steps"].items():
                self._sums[name] = self._sums.get(name, 0.0) + value
            for _, start_s, end_s, num_tokens in message["chunks"]:
                timed[start_s, end_s] = timed.get((start_s, end_s), 0) + num_tokens
        sums = self._sums
        self.count = sums.get("count", 0.0)
        self.total_s = sum(sums.get(name, 0.0) for name in ("plan_s", "compute_s", "draft_s", "apply_s"))
        of_chunks = sum(end_s - start_s for start_s, end_s in timed)
        compute_s, others = sums.get("compute_s", 0.0), self.count - len(timed)
        new = sums.get("new_tokens", 0.0)
        self.shared = sums.get("shared_tokens", 0.0) / new if new else None
        self.prompt_share = min(1.0, of_chunks / compute_s) if compute_s else None
        self.chunk_tokens = sum(timed.values()) / len(timed) if timed else None
        self.chunk_step_s = of_chunks / len(timed) if timed else None
        self.decode_step_s = max(0.0, compute_s - of_chunks) / others if others > 0 else None

    def share(self, *names: str) -> float | None:
        """Share of the steps' time in these parts of them."""
        return sum(self._sums[name] for name in names) / self.total_s if self.total_s else None


def quantile(before: Metrics, after: Metrics, name: str, share: float) -> float:
    """Return the quantile of a histogram's new observations, linear within a bucket; 0 where there are none."""
    start = f"{name}_bucket{{le="
    bounds = sorted((float(key[len(start) : -1]), key) for key in after if key.startswith(start))
    counts = [(bound, _grown(before, after, key)) for bound, key in bounds]
    if not counts or not counts[-1][1]:
        return 0.0
    wanted, below, low = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= wanted and count > below:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
        below, low = count, bound
    return low


def _samples(reading: Reading) -> list[_Sample]:
    if reading.live:
        gauges = [message["gauges"] for message in reading.live]
        return [
            _Sample(
                g["num_running"],
                g["num_waiting"],
                1 - (g["num_free_blocks"] + g["num_idle_blocks"]) / g["num_blocks"],
            )
            for g in gauges
        ]
    return [
        _Sample(m["vllm:num_requests_running"], m["vllm:num_requests_waiting"], m["vllm:kv_cache_usage_perc"])
        for m in reading.polled or [reading.after]
    ]


def _limits(reading: Reading) -> dict[str, Any]:
    live = reading.live[-1]["limits"] if reading.live else {}
    return {**live, **reading.runtime}


def _prefix_caching(metrics: Metrics) -> bool | None:
    info = next((name for name in metrics if name.startswith("vllm:cache_config_info{")), "")
    return "enable_prefix_caching=True" in info if "enable_prefix_caching=" in info else None


def _grown(before: Metrics, after: Metrics, name: str) -> float:
    """Return by how much a counter grew; a restarted engine counts from 0 again."""
    now, then = after.get(name, 0.0), before.get(name, 0.0)
    return now - then if now >= then else now


def _mean_of(before: Metrics, after: Metrics, name: str) -> float:
    count = _grown(before, after, f"{name}_count")
    return _grown(before, after, f"{name}_sum") / count if count else 0.0

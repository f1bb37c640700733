"""The flags of `quire bench latency|throughput|batching|startup`, as data (see `quire.args`)."""

from __future__ import annotations

from dataclasses import dataclass

from quire.args import flag

_LENGTHS = "512, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA[,MAX]"


@dataclass(frozen=True, slots=True)
class LatencyArgs:
    """One batch, again and again."""

    input_len: int = flag(128, "Prompt tokens.", group="Workload", low=1)
    output_len: int = flag(128, "Output tokens.", group="Workload", low=1)
    batch_size: int = flag(1, "Requests that start together.", group="Workload", low=1)
    warmup: int = flag(2, "Batches that are not counted.", group="Workload", low=0)
    iterations: int = flag(10, "Batches that are.", group="Workload", low=1)
    json: str | None = flag(None, "File for the summary.", group="Results")


@dataclass(frozen=True, slots=True)
class ThroughputArgs:
    """Many requests at once."""

    trace: str | None = flag(None, "File: Azure CSV, Mooncake, rtp-llm or ShareGPT-like JSONL; gzip or not.",
                             group="Workload")  # fmt: skip
    limit: int | None = flag(None, "Requests: the first N rows that fit [all; without a trace 100].", group="Workload",
                             low=1)  # fmt: skip
    input_len: str = flag("512", f"Prompt tokens without a trace: {_LENGTHS}.", group="Workload")
    output_len: str = flag("128", "Output tokens, the same way.", group="Workload")
    slo: str | None = flag(None, "What goodput counts: ttft=500ms,tpot=50ms,e2el=10s.", group="Results")
    json: str | None = flag(None, "File for the summary.", group="Results")


@dataclass(frozen=True, slots=True)
class BatchingArgs:
    """The gates beside each other, and decoding without a KV cache."""

    limit: int = flag(64, "Requests.", group="Workload", low=1)
    input_len: str = flag("64", f"Prompt tokens: {_LENGTHS}.", group="Workload")
    output_len: str = flag("lognormal:48,1.0,512", "Output tokens, the same way: what makes batches wait is that they "
                           "differ.", group="Workload")  # fmt: skip
    rate: float | None = flag(
        None, "Requests a second, as a Poisson process [all at once].", group="Workload"
    )
    slots: int = flag(16, "Requests in a batch at most.", group="Workload", low=1, high=65536)
    decode_len: int = flag(512, "Tokens decoded with and without the KV cache; 0 leaves that out.", group="Workload",
                           low=0)  # fmt: skip
    json: str | None = flag(None, "File for the figures.", group="Results")
    html: str | None = flag(None, "File for a report with plots (extra bench).", group="Results")


@dataclass(frozen=True, slots=True)
class StartupArgs:
    """`quire serve` from exec to the first token."""

    rounds: int = flag(3, "Starts.", group="Workload", low=1)
    idle_s: float = flag(3.0, "Seconds over which the CPU at rest is taken.", group="Workload", low=0.1)
    json: str | None = flag(None, "File for the figures.", group="Results")

"""The flags of `quire bench latency|throughput|batching|startup|kernel` (see `quire.args`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatencyArgs:
    """One batch, again and again."""

    input_len: int = 128
    output_len: int = 128
    batch_size: int = 1
    warmup: int = 2
    iterations: int = 10
    json: str | None = None


@dataclass(frozen=True, slots=True)
class ThroughputArgs:
    """Many requests at once."""

    trace: str | None = None
    limit: int | None = None
    input_len: str = "512"
    output_len: str = "128"
    slo: str | None = None
    json: str | None = None


@dataclass(frozen=True, slots=True)
class BatchingArgs:
    """The gates beside each other, and decoding without a KV cache."""

    limit: int = 64
    input_len: str = "64"
    output_len: str = "lognormal:48,1.0,512"
    rate: float | None = None
    slots: int = 16
    decode_len: int = 512
    json: str | None = None
    html: str | None = None


@dataclass(frozen=True, slots=True)
class StartupArgs:
    """`quire serve` from exec to the first token."""

    rounds: int = 3
    idle_s: float = 3.0
    json: str | None = None


@dataclass(frozen=True, slots=True)
class KernelArgs:
    """Single ops beside the bounds of the machine."""

    op: str | None = None
    isa: str | None = None
    threads: int | None = None
    seconds: float = 0.3
    json: bool = False

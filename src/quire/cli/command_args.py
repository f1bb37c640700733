"""The flags of `quire run`, `chat` and `plan` beside those of the engine (see `quire.args`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunArgs:
    """How to continue a text."""

    max_tokens: int = 128
    temperature: float | None = None
    sample_seed: int | None = None


@dataclass(frozen=True, slots=True)
class ChatArgs:
    """How to talk."""

    system: str | None = None
    temperature: float | None = None
    max_tokens: int = 512
    chat_template: str | None = None


@dataclass(frozen=True, slots=True)
class PlanArgs:
    """What to plan for."""

    model: str = "quill"
    gpu: str | None = None
    count: int = 1
    cpu: bool = False
    workload: str = "1024/256"
    rate: float | None = None
    concurrency: int | None = None
    slo: str | None = None
    quantize: str | None = None
    kv_dtype: str | None = None
    context: int | None = None
    engine: str | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256
    json: bool = False
    explain: bool = False
    search: bool = False

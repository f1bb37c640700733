"""The flags of `quire bench`, `quire profile` and `quire simulate` beside those of the engine (see `quire.args`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from quire.args import defaults
from quire.cli.flags import AutoscaleArgs
from quire.errors import ConfigError
from quire_gateway.config import RoutingArgs
from quire_gateway.routing import Policy
from quire_lab.workload.distributions import Fixed, parse_workload

# Settings of the engine that a simulation takes. Its step times were measured with the others, and depend on these only
# through the work of each step.
SIMULATED = (
    "max_model_len", "kv_memory", "num_kv_blocks", "block_size", "enable_prefix_caching", "max_num_seqs",
    "max_num_batched_tokens", "max_queue", "max_queue_tokens", "max_queue_mib", "max_ttft_ms", "gate", "order",
    "enable_chunked_prefill", "long_prefill_token_threshold", "dynamic_max_wait_ms",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ServeBenchArgs:
    """What to send to which server, how to count it, and where to write the results."""

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    endpoint: Literal["completions", "chat"] = "completions"
    prompts: Literal["ids", "words"] = "ids"
    api_key: str | None = None
    timeout_s: float = 600.0
    ready_s: float = 60.0
    extra_body: str | None = None
    warmup: int = 1
    workload: str | None = None
    trace: str | None = None
    limit: int | None = None
    time_scale: float = 1.0
    max_model_len: int | None = None
    input_len: str = "512"
    output_len: str = "128"
    prefix_len: int = 0
    num_prefixes: int = 1
    turns: int = 1
    think_s: float = 0.0
    cancel: float = 0.0
    vocab_size: int = 4096
    seed: int = 0
    rate: float | None = None
    burstiness: float = 1.0
    ramp_to: float | None = None
    concurrency: int | None = None
    sweep: bool = False
    sweep_runs: int = 1
    slo: str | None = None
    json: str | None = None
    jsonl: str | None = None
    html: str | None = None


@dataclass(frozen=True, slots=True)
class LatencyArgs:
    """One batch, repeated."""

    workload: str | None = None
    input_len: int = 128
    output_len: int = 128
    batch_size: int = 1
    warmup: int = 2
    iterations: int = 10
    json: str | None = None


@dataclass(frozen=True, slots=True)
class SpeculateBenchArgs:
    """Batches with several numbers of drafts."""

    drafts: str = "2,4,8"
    batch_sizes: str = "1,4,16"
    workload: str | None = None
    input_len: int = 16
    output_len: int = defaults(LatencyArgs)["output_len"]
    rounds: int = 5
    clock: Literal["wall", "cpu"] = "wall"
    json: str | None = None
    svg: str | None = None


@dataclass(frozen=True, slots=True)
class ThroughputArgs:
    """Many requests at once."""

    workload: str | None = None
    trace: str | None = None
    limit: int | None = None
    input_len: str = "512"
    output_len: str = "128"
    slo: str | None = None
    json: str | None = None


@dataclass(frozen=True, slots=True)
class ProfileArgs:
    """What to measure and where to write it."""

    out: str | None = None
    seconds: float = 100.0
    steps: str | None = None
    serving: bool = True
    parallel: bool = False


_AUTOSCALE = defaults(AutoscaleArgs)


@dataclass(frozen=True, slots=True)
class SimulateArgs:
    """Step times, replicas, and what happens to them."""

    profile: str | None = None
    hardware: str | None = None
    model: str | None = None
    tensor_parallel_size: int = 1
    tensor_parallel_layout: Literal["auto", "rows", "sums"] = "auto"
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    weights: str | None = None
    engine: str | None = None
    max_in_flight: int | None = None
    scenario: str | None = None
    beside: str | None = None
    versus: str | None = None
    draws: int = 9
    replicas: int = 1
    routing: Policy = "least-loaded"
    max_load_ratio: float = defaults(RoutingArgs)["max_load_ratio"]
    start_up_s: float = 0.0
    autoscale: Literal["off", "predicted", "utilisation"] = "off"
    max_replicas: int = _AUTOSCALE["max_replicas"]
    min_replicas: int = 1
    interval_s: float = _AUTOSCALE["interval_s"]
    down_after_s: float = _AUTOSCALE["down_after_s"]
    headroom: float = _AUTOSCALE["headroom"]
    target_busy: float = 0.7
    fault: str | None = None
    preemption: Literal["recompute", "swap"] = "recompute"
    swap_gb_s: float = 20.0
    acceptance: float | None = None
    num_drafts: int = 4
    draft_cost: float = 0.0
    disaggregate: str | None = None
    link_gb_s: float | None = None


Args = TypeVar("Args", ServeBenchArgs, LatencyArgs, SpeculateBenchArgs, ThroughputArgs)


def with_workload(args: Args) -> Args:
    """Return ``args`` with ``workload`` as the lengths or the trace that it stands for.

    Raises:
        ConfigError: it is neither, or one of these is given as well; or the command takes no such lengths.
    """
    if args.workload is None:
        return args
    known = type(args).__dataclass_fields__
    for name in ("trace", "input_len", "output_len"):
        if name in known and getattr(args, name) != known[name].default:
            raise ConfigError(f"--workload {args.workload} and --{name.replace('_', '-')}: give one of them")
    lengths = parse_workload(args.workload)
    if lengths is None and "trace" not in known:
        raise ConfigError(
            f"--workload {args.workload}: a trace is not taken here; give PROMPT/OUTPUT in tokens"
        )
    values: dict[str, Any] = {"workload": None}
    if lengths is None:
        values["trace"] = args.workload
    elif "trace" in known:
        values |= {"input_len": str(lengths[0]), "output_len": str(lengths[1])}
    else:
        for name, length in zip(("input_len", "output_len"), lengths, strict=True):
            if not isinstance(length, Fixed):
                raise ConfigError(
                    f"--workload {args.workload}: requests are equal here; give two numbers, as 128/128"
                )
            values[name] = length.length
    return replace(args, **values)

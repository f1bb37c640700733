"""`quire bench`: serve | latency | throughput | batching | startup | kernel."""

from __future__ import annotations

from typing import Any

import typer

from quire.args import EngineArgs
from quire.bench.offline_args import BatchingArgs, KernelArgs, LatencyArgs, StartupArgs, ThroughputArgs
from quire.bench.serve_args import ServeBenchArgs
from quire.cli.flags import ModelArgument, command_with, pick, with_model

bench_app = typer.Typer(
    help="Measure: serve, latency, throughput, batching, startup, kernel.", no_args_is_help=True
)


@bench_app.command("serve")
@command_with(ServeBenchArgs)
def bench_serve(*, settings: dict[str, Any]) -> None:
    """Put load on a server: TTFT, TPOT, ITL, E2EL, throughput and goodput, from the intended send times."""
    from quire.bench.serve import run

    raise typer.Exit(run(pick(ServeBenchArgs, settings)))


@bench_app.command("latency")
@command_with(EngineArgs, LatencyArgs, skip=("model",))
def bench_latency(model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """Time batches of equal requests, without a server."""
    from quire.bench.batch import latency

    raise typer.Exit(latency(pick(EngineArgs, with_model(model, settings)), pick(LatencyArgs, settings)))


@bench_app.command("throughput")
@command_with(EngineArgs, ThroughputArgs, skip=("model",))
def bench_throughput(model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """All requests at once, without a server: tokens a second."""
    from quire.bench.batch import throughput

    raise typer.Exit(
        throughput(pick(EngineArgs, with_model(model, settings)), pick(ThroughputArgs, settings))
    )


@bench_app.command("batching")
@command_with(EngineArgs, BatchingArgs, skip=("model", "gate", "max_num_seqs", "enable_prefix_caching"))
def bench_batching(model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """Static, dynamic and continuous batching of the same requests; decoding with and without the KV cache."""
    from quire.bench.batching import batching

    raise typer.Exit(batching(pick(EngineArgs, with_model(model, settings)), pick(BatchingArgs, settings)))


@bench_app.command("startup", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@command_with(StartupArgs)
def bench_startup(context: typer.Context, model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """`quire serve` from exec to the first token, CPU at rest, memory. Other flags go to `quire serve`."""
    from quire.bench.startup import startup

    raise typer.Exit(startup(model or "quill", context.args, pick(StartupArgs, settings)))


@bench_app.command("kernel")
@command_with(KernelArgs)
def bench_kernel(*, settings: dict[str, Any]) -> None:
    """Time single ops beside the read bandwidth and the dot peak that this machine gives now."""
    from quire.bench.kernel import kernel

    kernel(pick(KernelArgs, settings))

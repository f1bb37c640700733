"""`quire bench`: serve | latency | throughput | batching | startup | kernel."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quire.args import EngineArgs
from quire.bench.offline_args import BatchingArgs, LatencyArgs, StartupArgs, ThroughputArgs
from quire.bench.serve_args import ServeBenchArgs
from quire.cli.flags import command_with, pick

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="'quill' (default), a local folder, a .gguf file, or a hub id.", show_default=False),
]
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

    raise typer.Exit(latency(engine_args(model, settings), pick(LatencyArgs, settings)))


@bench_app.command("throughput")
@command_with(EngineArgs, ThroughputArgs, skip=("model",))
def bench_throughput(model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """All requests at once, without a server: tokens a second."""
    from quire.bench.batch import throughput

    raise typer.Exit(throughput(engine_args(model, settings), pick(ThroughputArgs, settings)))


@bench_app.command("batching")
@command_with(EngineArgs, BatchingArgs, skip=("model", "gate", "max_num_seqs", "enable_prefix_caching"))
def bench_batching(model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """Static, dynamic and continuous batching of the same requests; decoding with and without the KV cache."""
    from quire.bench.batching import batching

    raise typer.Exit(batching(engine_args(model, settings), pick(BatchingArgs, settings)))


@bench_app.command("startup", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@command_with(StartupArgs)
def bench_startup(context: typer.Context, model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """`quire serve` from exec to the first token, CPU at rest, memory. Other flags go to `quire serve`."""
    from quire.bench.startup import startup

    raise typer.Exit(startup(model or "quill", context.args, pick(StartupArgs, settings)))


@bench_app.command("kernel")
def bench_kernel(
    op: Annotated[
        str | None,
        typer.Option("--op", help="linear, attention, norm or sampling [all].", show_default=False),
    ] = None,
    isa: Annotated[
        str | None,
        typer.Option("--isa", help="Level of the kernels [the best of this CPU].", show_default=False),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads [one a core].", min=1, show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Time for each line.", min=0.0)] = 0.3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time single ops beside the read bandwidth and the dot peak that this machine gives now."""
    from quire.bench.kernel_report import kernel

    kernel(op, isa, threads, seconds, as_json=as_json)


def engine_args(model: str | None, settings: dict[str, Any]) -> EngineArgs:
    """The engine's settings; a model given as argument wins over the TOML file's."""
    return pick(EngineArgs, settings | ({"model": model} if model is not None else {}))

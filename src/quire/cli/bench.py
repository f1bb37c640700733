"""`quire bench`: serve | latency | throughput."""

from __future__ import annotations

from typing import Any

import typer

from quire.args import EngineArgs
from quire.bench.args import LatencyArgs, ServeBenchArgs, ThroughputArgs
from quire.cli.flags import ModelArgument, command_with, pick, with_model

bench_app = typer.Typer(help="Measure: serve, latency, throughput.", no_args_is_help=True)


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
    from quire.bench.offline import latency

    raise typer.Exit(latency(pick(EngineArgs, with_model(model, settings)), pick(LatencyArgs, settings)))


@bench_app.command("throughput")
@command_with(EngineArgs, ThroughputArgs, skip=("model",))
def bench_throughput(model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """All requests at once, without a server: tokens a second."""
    from quire.bench.offline import throughput

    raise typer.Exit(
        throughput(pick(EngineArgs, with_model(model, settings)), pick(ThroughputArgs, settings))
    )

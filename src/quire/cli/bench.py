"""`quire bench`: serve | kernel."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quire.bench.serve_args import ServeBenchArgs
from quire.cli.flags import command_with, pick

bench_app = typer.Typer(help="Measure: serve, kernel.", no_args_is_help=True)


@bench_app.command("serve")
@command_with(ServeBenchArgs)
def bench_serve(*, settings: dict[str, Any]) -> None:
    """Put load on a server: TTFT, TPOT, ITL, E2EL, throughput and goodput, from the intended send times."""
    from quire.bench.serve import run

    raise typer.Exit(run(pick(ServeBenchArgs, settings)))


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

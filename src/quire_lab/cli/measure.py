"""`quire bench serve | latency | throughput | speculate`, `quire profile`, `quire eval` and `quire simulate`."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import typer

from quire.args import EngineArgs, ServerArgs, flag_name, settings_of
from quire.cli.command import SettingsCommand
from quire.cli.flags import ModelArgument, command_with, pick, with_model
from quire_lab.bench.args import (
    SIMULATED,
    LatencyArgs,
    ProfileArgs,
    ServeBenchArgs,
    SimulateArgs,
    SpeculateBenchArgs,
    ThroughputArgs,
)
from quire_lab.eval.args import FP32, EvalArgs

bench_app = typer.Typer(
    help="Measure: serve, latency, throughput, speculate.", no_args_is_help=True, add_completion=False
)
profile_app = typer.Typer(add_completion=False)
eval_app = typer.Typer(add_completion=False)
simulate_app = typer.Typer(add_completion=False)


@bench_app.command("serve", cls=SettingsCommand)
@command_with(ServeBenchArgs)
def bench_serve(*, settings: dict[str, Any]) -> None:
    """Put load on a server: TTFT, TPOT, ITL, E2EL, throughput and goodput, from the intended send times."""
    from quire_lab.bench.serve import run

    raise typer.Exit(run(pick(ServeBenchArgs, settings)))


@bench_app.command("latency", cls=SettingsCommand)
@command_with(EngineArgs, LatencyArgs, skip=("model",))
def bench_latency(model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """Time batches of equal requests, without a server."""
    from quire_lab.bench.offline import latency

    raise typer.Exit(latency(pick(EngineArgs, with_model(model, settings)), pick(LatencyArgs, settings)))


@bench_app.command("throughput", cls=SettingsCommand)
@command_with(EngineArgs, ThroughputArgs, skip=("model",))
def bench_throughput(model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """Run all requests at once, without a server: tokens per second."""
    from quire_lab.bench.offline import throughput

    raise typer.Exit(
        throughput(pick(EngineArgs, with_model(model, settings)), pick(ThroughputArgs, settings))
    )


@bench_app.command("speculate", cls=SettingsCommand)
@command_with(EngineArgs, SpeculateBenchArgs, skip=("model", "spec_tokens"))
def bench_speculate(model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """Compare numbers of drafts with plain decoding and with theory, without a server."""
    from quire_lab.bench.speculate import speculate

    engine = pick(EngineArgs, with_model(model, settings))
    raise typer.Exit(speculate(engine, pick(SpeculateBenchArgs, settings)))


LIVE = (
    *(s.name for s in settings_of(ServeBenchArgs).values() if s.group == "Server"),
    "vocab_size",
)


def _all_but(shown: set[str], *kinds: type[Any]) -> tuple[str, ...]:
    return tuple({f.name for kind in kinds for f in fields(kind)} - shown)


def _names(kind: type[Any]) -> set[str]:
    return {f.name for f in fields(kind)}


_SHOWN = _names(SimulateArgs) | (_names(ServeBenchArgs) - set(LIVE)) | set(SIMULATED)
# The server around the steps is measured without drafts: a gap between two tokens is then one step.
SPECULATION = ("speculate", "draft_model", "spec_tokens", "spec_tree", "spec_accept")
_PROFILED = (_names(EngineArgs) - {"model"}) | _names(ProfileArgs)


@profile_app.command(cls=SettingsCommand)
@command_with(ProfileArgs, EngineArgs, ServerArgs, skip=_all_but(_PROFILED, EngineArgs, ServerArgs))
def profile(model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """Measure this machine's steps, for plan, simulate and serve --slo."""
    from quire_lab.bench.profile import profile

    every = with_model(model, settings)
    flags = as_flags({k: v for k, v in every.items() if k != "model" and k not in SPECULATION})
    raise typer.Exit(profile(pick(EngineArgs, every), pick(ProfileArgs, every), flags))


# Settings of the engine that change what a model computes, or how fast.
_EVALUATED = {
    "revision", "tokenizer", "load_format", "dtype", "quantize", "quantize_head", "kv_dtype", "packed_cache", "device",
    "threads", "cpu_isa", "batch_invariant", "max_num_batched_tokens",
}  # fmt: skip


class EvalCommand(SettingsCommand):
    """A command whose ``--against`` may stand without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_original(args))


def with_original(args: list[str]) -> list[str]:
    """Return ``args`` with fp32 behind an ``--against`` that no value follows."""
    completed: list[str] = []
    for arg, following in zip(args, [*args[1:], "-"], strict=True):
        completed.append(arg)
        if arg == "--against" and following.startswith("-"):
            completed.append(FP32)
    return completed


@eval_app.command("eval", cls=EvalCommand)
@command_with(EvalArgs, EngineArgs, skip=_all_but(_EVALUATED, EngineArgs))
def evaluate(model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """Measure how faithful a model is: perplexity, KL from its original, choice tasks."""
    from quire_lab.eval.run import run

    raise typer.Exit(run(pick(EngineArgs, with_model(model, settings)), pick(EvalArgs, settings)))


@simulate_app.command(cls=SettingsCommand)
@command_with(
    SimulateArgs,
    ServeBenchArgs,
    EngineArgs,
    ServerArgs,
    skip=_all_but(_SHOWN, ServeBenchArgs, EngineArgs, ServerArgs),
)
def simulate(*, settings: dict[str, Any]) -> None:
    """Run a workload through the real scheduler on a virtual clock.

    Cache and router are the real ones too; it needs no model and no torch.
    """
    args = pick(SimulateArgs, settings)
    if args.scenario is not None:
        from quire_lab.sim.scenario import run_scenario

        raise typer.Exit(run_scenario(args.scenario, settings))
    from quire_lab.cli.simulate import run

    flags = pick(ServeBenchArgs, {k: v for k, v in settings.items() if k not in LIVE})
    engine = {k: v for k, v in settings.items() if k in _names(EngineArgs) and k not in ("seed", "model")}
    raise typer.Exit(run(args, flags, engine))


def as_flags(settings: dict[str, Any]) -> list[str]:
    """Return the engine's settings among ``settings`` as flags of ``quire serve``."""
    flags = []
    for f in fields(EngineArgs):
        if f.name not in settings:
            continue
        name, value = flag_name(f.name), settings[f.name]
        if isinstance(value, bool):
            off = f"--no-{name[2:].removeprefix('enable-')}" if f.default else f"--no-{name[2:]}"
            flags.append(name if value else off)
        else:
            flags += [name, str(value)]
    return flags

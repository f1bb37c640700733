"""`quire`: serve | run | chat | bench | profile | simulate | plan | doctor. Commands import what they need late."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from quire.args import EngineArgs, ServerArgs
from quire.cli.bench import bench_app
from quire.cli.flags import command_with
from quire.cli.simulation import profile, simulate
from quire.errors import QuireError

app = typer.Typer(
    name="quire",
    help="Serve large language models: exact, fast on what you have, small enough to read.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.add_typer(bench_app, name="bench")
app.command()(profile)
app.command()(simulate)

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="'quill' (default), a local folder, a .gguf file, or a hub id.", show_default=False),
]


def with_model(model: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The model given as argument wins over the TOML file's."""
    return settings | {"model": model} if model is not None else settings


@app.command()
@command_with(EngineArgs, ServerArgs, skip=("model",))
def serve(model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    from quire.cli.serve import serve

    raise typer.Exit(serve(with_model(model, settings)))


@app.command()
@command_with(EngineArgs, skip=("model",))
def run(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue (default: standard input).")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens to write at most.")] = 128,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 is greedy (the model's).")
    ] = None,
    sample_seed: Annotated[
        int | None, typer.Option("--sample-seed", help="Seed of the sampling (random).")
    ] = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Continue one text and print it as it comes. With one argument alone, that is the prompt, for Quill."""
    from quire.cli.terminal import run

    if prompt is None and model is not None and sys.stdin.isatty():
        model, prompt = None, model
    given = {"max_tokens": max_tokens, "temperature": temperature, "seed": sample_seed}
    raise typer.Exit(
        run(with_model(model, settings), prompt, {k: v for k, v in given.items() if v is not None})
    )


@app.command()
@command_with(EngineArgs, skip=("model",))
def chat(
    model: ModelArgument = None,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 is greedy (the model's).")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Tokens of an answer at most (512).")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option("--chat-template", help="File of a Jinja chat template.")
    ] = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Chat in the terminal: streaming, history, Ctrl-C stops an answer."""
    from quire.cli.terminal import chat

    given = {"max_tokens": max_tokens or 512, "temperature": temperature}
    sampling = {k: v for k, v in given.items() if v is not None}
    raise typer.Exit(chat(with_model(model, settings), system, sampling, chat_template))


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A preset or hub id (docs/planner.md), a local folder, or 'quill'.")
    ],
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="A device of the hardware table: h100, mi300x, epyc-9755 …")
    ] = None,
    count: Annotated[int, typer.Option("--count", help="How many of them.", min=1)] = 1,
    cpu: Annotated[bool, typer.Option("--cpu", help="This machine instead, measured in a second.")] = False,
    workload: Annotated[
        str, typer.Option("--workload", help="PROMPT/OUTPUT tokens, or a trace file for its means.")
    ] = "1024/256",
    rate: Annotated[float | None, typer.Option("--rate", help="Requests a second, at random times.")] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", help="Or so many clients (1).", min=1)
    ] = None,
    slo: Annotated[
        str | None, typer.Option("--slo", help="As ttft=500ms,tpot=50ms: means, in the formulas.")
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option("--quantize", help="Weights: bf16, fp8, int8, int4, fp4, mxfp4 (the model's)."),
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option("--kv-dtype", help="bf16, fp8 or int8.")] = None,
    context: Annotated[
        int | None,
        typer.Option("--context", help="Tokens of a request, for memory (prompt + output).", min=1),
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="Fitted constants: default, vllm, sglang, trtllm or cpu.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option("--max-num-batched-tokens", help="Tokens of a step (8192; CPU: 2048).", min=1),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="Sequences at once.", min=1)] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Simulate settings for the cheapest that holds --slo at --rate.")
    ] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Each figure with its formula.")] = False,
) -> None:
    """Does it fit, how fast would it be, what would it cost: from formulas, with the line to run."""
    from quire.cli.plan import Asked, plan

    asked = Asked(
        model, gpu, count, cpu, workload, rate, concurrency, slo, quantize, kv_dtype, context, engine,
        max_num_batched_tokens, max_num_seqs, as_json, explain, search,
    )  # fmt: skip
    raise typer.Exit(plan(asked))


@app.command()
def doctor(
    model: ModelArgument = None,
    quantize: Annotated[
        str | None, typer.Option("--quantize", help="As quire serve takes it.", show_default=False)
    ] = None,
    quantize_head: Annotated[
        str | None, typer.Option("--quantize-head", help="As quire serve takes it.", show_default=False)
    ] = None,
    check: Annotated[
        str | None,
        typer.Option("--check", help="Read all weights of this model: shapes, types, NaN and infinity."),
    ] = None,
) -> None:
    """Say what this machine has and what to install; with a model, what it is held in and its bytes; or check one."""
    if check is not None:
        from quire.cli.check_model import check_model

        raise typer.Exit(check_model(check))
    if model is not None:
        from quire.cli.doctor_model import model_report

        model_report(EngineArgs(model=model, quantize=quantize, quantize_head=quantize_head))
        return
    from quire.cli.doctor import report

    report()


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version

    typer.echo(version("quire"))


def main() -> None:
    """Entry point of the `quire` script: an error of the world is one line on stderr and status 1."""
    try:
        app()
    except QuireError as error:
        typer.secho(f"quire: {error}", err=True, fg="red" if sys.stderr.isatty() else None)
        sys.exit(1)

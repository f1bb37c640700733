"""`quire`: serve | gateway | run | chat | pull | list | rm | bench | profile | simulate … Commands import late."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quire import __version__
from quire.args import EngineArgs, ServerArgs, comma_list, settings_of
from quire.cli.command import Commands, SettingsCommand
from quire.cli.flags import (
    FEW,
    ON_DEMAND,
    AutoscaleArgs,
    ChatArgs,
    ModelArgument,
    PlanArgs,
    ReplayArgs,
    RunArgs,
    command_with,
    pick,
    with_model,
)
from quire.cli.table import from_table
from quire.errors import QuireError

app = typer.Typer(
    name="quire",
    cls=Commands,
    help="Serve large language models: exact, fast on what you have, small enough to read.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


AllowedHosts = Annotated[
    str | None,
    typer.Option("--allowed-hosts", help=settings_of(ServerArgs)["allowed_hosts"].help, show_default=False),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, metavar="", help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@app.command(cls=SettingsCommand)
@command_with(EngineArgs, ServerArgs, skip=("model",))
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL",
            help="'quill' (default), a local folder, a .gguf file, or a hub id. Several, each as MODEL or NAME=MODEL, "
            "are loaded on demand.",
            show_default=False,
        ),
    ] = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    models = models or [settings.get("model", EngineArgs().model)]
    if len(models) > 1 or any(name in settings for name in ON_DEMAND):
        serve_models = from_table("serve MODEL MODEL")
        raise typer.Exit(serve_models(settings, models, pick(ServerArgs, settings)))
    from quire.cli.serve import serve

    raise typer.Exit(serve(with_model(models[0], settings)))


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def launch(
    context: typer.Context,
    tool: Annotated[
        str, typer.Argument(help="claude, codex, opencode, qwen, aider, open-webui (docs/connect.md).")
    ],
    url: Annotated[str, typer.Option("--url", help="Of a running server.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", help="Name of a model there (the first).", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Key of the server.", show_default=False)
    ] = None,
) -> None:
    """Start a coding agent or another tool with its model."""
    from quire.cli.clients import launch

    launch(tool, context.args, url, model, api_key)


@app.command()
def gateway(
    config: Annotated[Path, typer.Option("--config", help="TOML file of the gateway (docs/gateway.md).")],
    host: Annotated[
        str | None,
        typer.Option("--host", help="Address to listen on, instead of the file's.", show_default=False),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", help="Port to listen on, instead of the file's.", show_default=False),
    ] = None,
    hooks: Annotated[
        list[str] | None, typer.Option("--filter", help="module:Class of a filter, behind the file's.")
    ] = None,
    allowed_hosts: AllowedHosts = None,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option("--log-format", help="human or json.")] = "human",
) -> None:
    """One address in front of many servers: routing, retries, limits."""
    names = None if allowed_hosts is None else comma_list(allowed_hosts)
    flags = {"host": host, "port": port, "allowed_hosts": names}
    raise typer.Exit(from_table("gateway")(config, flags, hooks or [], log_level, log_format))


@app.command()
def cockpit(
    url: Annotated[str, typer.Argument(help="Of a running server or gateway.")] = "http://127.0.0.1:8000",
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.", min=1, max=65535)] = 8500,
    admin_url: Annotated[
        str | None,
        typer.Option(
            "--admin-url", help="URL of the server's admin surface, or unix:PATH.", show_default=False
        ),
    ] = None,
    allowed_hosts: AllowedHosts = None,
) -> None:
    """Show a page of it: chat, live view, plans and lessons."""
    raise typer.Exit(from_table("cockpit")(url, host, port, admin_url, allowed_hosts))


@app.command(cls=SettingsCommand)
@command_with(AutoscaleArgs)
def autoscale(*, settings: dict[str, Any]) -> None:
    """Start and end replicas behind a gateway as the load needs them."""
    raise typer.Exit(from_table("autoscale")(pick(AutoscaleArgs, settings)))


@app.command(cls=SettingsCommand)
@command_with(
    RunArgs,
    EngineArgs,
    skip=("model",),
    few=(*FEW, "max_tokens", "temperature", "sample_seed", "draft_model"),
)
def run(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue (default: standard input).")
    ] = None,
    *,
    settings: dict[str, Any],
) -> None:
    """Continue one text and print it as it comes.

    With one argument alone, that is the prompt, for Quill.
    """
    from quire.cli.terminal import run

    if prompt is None and model is not None and (sys.stdin.isatty() or _is_text(model)):
        model, prompt = None, model
    raise typer.Exit(run(with_model(model, settings), prompt, pick(RunArgs, settings)))


def _is_text(argument: str) -> bool:
    """Whether ``quire run ARGUMENT`` without a terminal, as in a script, has a text for Quill and no model's name."""
    return len(argument.split()) > 1 and not Path(argument).exists()


@app.command(cls=SettingsCommand)
@command_with(
    ChatArgs, EngineArgs, skip=("model",), few=(*FEW, "max_tokens", "temperature", "system", "chat_template")
)
def chat(model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """Chat in the terminal: streaming, history, Ctrl-C stops an answer."""
    from quire.cli.terminal import chat

    raise typer.Exit(chat(with_model(model, settings), pick(ChatArgs, settings)))


@app.command(cls=SettingsCommand)
@command_with(PlanArgs, skip=("model",))
def plan(
    model: Annotated[
        str, typer.Argument(help="A preset or hub id (docs/planner.md), a local folder, or 'quill'.")
    ] = "quill",
    *,
    settings: dict[str, Any],
) -> None:
    """Does a model fit, how fast would it be, what would it cost.

    It ends with the line to run.
    """
    raise typer.Exit(from_table("plan")(pick(PlanArgs, with_model(model, settings))))


@app.command()
def pull(
    model: Annotated[
        str, typer.Argument(help="org/repo of the hub, or org/repo:Q8_0 for one GGUF file of it.")
    ],
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit.", show_default=False)
    ] = None,
) -> None:
    """Download a model into the cache of the hub."""
    from quire.cli.models import pull

    pull(model, revision)


@app.command("list")
def list_() -> None:
    """List the models of this machine."""
    from quire.cli.models import show_models

    show_models()


@app.command()
def rm(models: Annotated[list[str], typer.Argument(help="Names that `quire list` shows.")]) -> None:
    """Delete models from the cache of the hub."""
    from quire.cli.models import remove_models

    remove_models(models)


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
        typer.Option("--check", help="Read all of this model: weights, tokenizer, chat template."),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(help="Say where the ranks would run. As quire serve takes it.", min=1)
    ] = 1,
    pipeline_parallel_size: Annotated[int, typer.Option(help="The same, with stages.", min=1)] = 1,
    server: Annotated[
        str | None,
        typer.Option(
            help="URL of a running server: say where its ranks are and what each does.", show_default=False
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Key of that server.", show_default=False)] = None,
) -> None:
    """Say what this machine has, what is used, and what to install.

    With a model, what it is held in and its bytes; with --check, read all of it.
    """
    if check is not None:
        from quire.cli.check_model import check_model

        raise typer.Exit(check_model(check))
    if server is not None:
        from_table("doctor --server")(server, api_key)
        return
    if tensor_parallel_size * pipeline_parallel_size > 1:
        from quire.cli.doctor import ranks

        ranks(tensor_parallel_size, pipeline_parallel_size)
        return
    if model is not None:
        from quire.cli.check_model import model_report

        model_report(EngineArgs(model=model, quantize=quantize, quantize_head=quantize_head))
        return
    from quire.cli.doctor import report

    report()


@app.command()
@command_with(ReplayArgs)
def replay(
    file: Annotated[Path, typer.Argument(help="A file of the flight recorder (docs/metrics.md).")],
    *,
    settings: dict[str, Any],
) -> None:
    """Run a recording of a server again, and show the first difference."""
    from quire.cli.replay import replay

    raise typer.Exit(replay(file, pick(ReplayArgs, settings)))


@app.command()
def diagnose(
    url: Annotated[str, typer.Argument(help="Of a running server.")] = "http://127.0.0.1:8000",
    seconds: Annotated[float, typer.Option("--seconds", help="How long to watch.", min=0.5, max=600.0)] = 5.0,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Key of the server.", show_default=False)
    ] = None,
    admin_url: Annotated[
        str | None,
        typer.Option(
            "--admin-url", help="URL of its admin surface, or unix:PATH, for /runtime.", show_default=False
        ),
    ] = None,
    admin_key: Annotated[
        str | None, typer.Option("--admin-key", help="Key of the admin surface.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what limits it under load, and what to change."""
    raise typer.Exit(from_table("diagnose")(url, seconds, api_key, admin_url, admin_key, as_json=json))


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def learn(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(help="A simulation (docs/learn.md); without it, the list of all.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the picture as one JSON object.")] = False,
) -> None:
    """Lessons on how serving works, each with its --control VALUE."""
    raise typer.Exit(from_table("learn")(name, context.args, as_json=json))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def _ours(arguments: list[str]) -> list[str]:
    """Return the arguments of ``quire serve`` in our flags, where they are those of another server."""
    from quire.cli.foreign import translated

    ours, notes = translated(arguments)
    for note in notes:
        typer.echo(f"quire: {note}", err=True)
    return ours


def main() -> None:
    """Entry point of the `quire` script: an error of the world is one line on stderr and status 1."""
    try:
        if sys.argv[1:2] == ["serve"]:
            sys.argv[2:] = _ours(sys.argv[2:])
        app()
    except QuireError as error:
        typer.secho(f"quire: {error}", err=True, fg="red" if sys.stderr.isatty() else None)
        sys.exit(1)

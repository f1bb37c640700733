"""Flags from data: the fields of `quire.args` become parameters of Typer commands and keys of a TOML file.

The settings of `quire run`, `chat`, `plan` and `autoscale` that are not the engine's are at the end.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from typer.core import TyperCommand

from quire.args import Args, Setting, defaults, flag_name, make_args, rare_names, settings_of
from quire.errors import ConfigError, nearest

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="'quill' (default), a local folder, a .gguf file, or a hub id.", show_default=False),
]
ON_DEMAND = ("model_memory", "pin", "keep_alive_s", "load_timeout_s")  # settings of `quire serve A B`
_WIDEST = 16  # choices as wide as that stand beside the name
CONFIG_HELP = "TOML file with the same names as the flags (max_model_len = 4096); flags win."


def command_with(*kinds: type[Any], skip: tuple[str, ...] = ()) -> Callable[[Any], Any]:
    """Decorate a command so that it takes every setting of ``kinds`` as a flag, and ``--config``.

    Where two kinds have a name in common, the flag of the first is shown, and both get the value. The function is
    called with its own parameters and ``settings``: key → value, of the settings that were given.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(function).parameters.values() if p.name != "settings"]
        shown = {
            f.name: _option(f, d) for f, d in settings_with_defaults(reversed(kinds)) if f.name not in skip
        }
        options = [shown.pop(f.name) for f, _ in settings_with_defaults(kinds) if f.name in shown]
        rare = rare_names()
        config = inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                Path | None, typer.Option("--config", help=CONFIG_HELP, rich_help_panel="Settings")
            ],
        )

        rest = [o for o in options if o.name in rare]
        everything = inspect.Parameter(
            "help_all",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[
                bool,
                typer.Option(
                    "--help-all",
                    help=f"Show {len(rest)} more settings, which few people need, and exit.",
                    rich_help_panel="Settings",
                    is_eager=True,
                    callback=_show_all,
                    hidden=not rest,
                ),
            ],
        )

        def wrapper(**values: Any) -> None:
            values.pop("help_all")
            said = {o.name: v for o in options if (v := values.pop(o.name)) not in (None, [])}
            path = values.pop("config")
            from_file = read_toml(path, kinds) if path is not None else {}
            function(**values, settings=from_file | said)

        wrapper.__name__ = function.__name__
        wrapper.__doc__ = function.__doc__
        hints = get_type_hints(function, include_extras=True)
        parameters = [p.replace(annotation=hints[p.name]) for p in own] + options + [config, everything]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _show_all(context: typer.Context, asked: bool) -> None:
    """Print the help with every option and exit."""
    if asked:
        for parameter in context.command.params:
            if parameter.name in rare_names():
                parameter.hidden = False  # type: ignore[attr-defined]
        typer.echo(context.get_help())
        raise typer.Exit


def settings_with_defaults(kinds: Iterable[type[Any]]) -> Iterator[tuple[Setting, Any]]:
    for kind in kinds:
        known = settings_of(kind)  # type: ignore[arg-type]  # mypy: type[Any] is not hashable
        for key, default in defaults(kind).items():
            yield known[key], default


def _option(spec: Setting, default: Any) -> inspect.Parameter:
    kinds = [t for t in spec.types if t is not type(None)]
    python_type = bool if bool in kinds else float if float in kinds else int if kinds == [int] else str
    name = flag_name(spec.name)
    if python_type is bool:
        name = f"{name}/{_negative(name, default)}"
    metavar = {int: "N", float: "X", str: "TEXT", bool: ""}[python_type]
    choices = "|".join(spec.choices)
    return inspect.Parameter(
        spec.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            (list[str] if tuple in kinds else python_type) | None,
            typer.Option(
                name,
                help=_help(spec, default),
                rich_help_panel=spec.group,
                metavar=choices if 0 < len(choices) <= _WIDEST else metavar,
                hidden=spec.name in rare_names(),
            ),
        ],
    )


def _help(spec: Setting, default: Any) -> str:
    # Square brackets hold the default in ``settings.toml``; in Typer's help they would be markup.
    text = spec.help.replace("[", "(").replace("]", ")")
    if len("|".join(spec.choices)) > _WIDEST:
        text += f" One of {', '.join(spec.choices)}."
    if default is None or default == ():
        return text
    if default is True:
        return f"{text} (on; {_negative(flag_name(spec.name), default)} turns it off)"
    return f"{text} ({'off' if default is False else default})"


def _negative(flag: str, default: Any) -> str:
    return f"--no-{flag[2:].removeprefix('enable-') if default else flag[2:]}"


class SettingsCommand(TyperCommand):
    """A command whose help has one column for names: a negative name stands in the text of its setting."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """As click's; parsing knows all names."""
        saved = [(p, p.secondary_opts) for p in self.params]
        for parameter, _ in saved:
            parameter.secondary_opts = []
        try:
            super().format_help(ctx, formatter)
        finally:
            for parameter, names in saved:
                parameter.secondary_opts = names


def read_toml(path: Path, kinds: tuple[type[Any], ...]) -> dict[str, Any]:
    """Return the settings of a TOML file. Tables only group the keys; their names do not matter.

    Raises:
        ConfigError: the file is missing, is not TOML, or holds a name that no flag has.
    """
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read ({error.strerror})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path}: not valid TOML: {error}") from error
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat.update(value if isinstance(value, dict) else {key: value})
    known = {f.name for kind in kinds for f in fields(kind)}
    for key in flat:
        if key not in known:
            raise ConfigError(f"--config {path}: unknown setting {key!r}{nearest(key, known)}")
    return flat


def with_model(model: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Return ``settings`` with the model given as an argument, which wins over the TOML file's."""
    return settings | {"model": model} if model is not None else settings


def pick(kind: type[Args], settings: dict[str, Any]) -> Args:
    """Build the args of one kind from settings that may also hold the keys of others."""
    names = {f.name for f in fields(kind)}
    return make_args(kind, {k: v for k, v in settings.items() if k in names}, origin="settings")


@dataclass(frozen=True, slots=True)
class RunArgs:
    """`quire run`."""

    max_tokens: int = 128
    temperature: float | None = None
    sample_seed: int | None = None


@dataclass(frozen=True, slots=True)
class ChatArgs:
    """`quire chat`."""

    system: str | None = None
    temperature: float | None = None
    max_tokens: int = 512
    chat_template: str | None = None


@dataclass(frozen=True, slots=True)
class PlanArgs:
    """`quire plan`."""

    model: str = "quill"
    gpu: str | None = None
    count: int = 1
    cpu: bool = False
    split: str | None = None
    nodes: int | None = None
    network_gb_s: float = 1.25
    profile: str | None = None
    price: float | None = None
    watts: float | None = None
    purchase: float | None = None
    power_price: float = 0.12
    workload: str = "1024/256"
    rate: float | None = None
    concurrency: int | None = None
    prefix: int = 0
    slo: str | None = None
    quantize: str | None = None
    kv_dtype: str | None = None
    context: int | None = None
    engine: str | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int = 256
    draft: str | None = None
    objective: Literal["throughput", "latency", "cost"] = "throughput"
    api_price: float | None = None
    compare: str | None = None
    json: bool = False
    explain: bool = False
    search: bool = False


@dataclass(frozen=True, slots=True)
class AutoscaleArgs:
    """`quire autoscale`."""

    gateway: str = "http://127.0.0.1:8080"
    slo: str = "ttft=1s,tpot=100ms"
    profile: str | None = None
    hardware: str | None = None
    model: str | None = None
    tensor_parallel: int = 1
    weights: str | None = None
    executor: Literal["local", "kubernetes", "ray", "webhook"] = "local"
    command: str | None = None
    target: str | None = None
    namespace: str | None = None
    server: str | None = None
    webhook: str | None = None
    webhook_key: str | None = None
    ray_address: str | None = None
    ray_cpus: float = 1.0
    ray_gpus: float = 0.0
    min_replicas: int = 1
    max_replicas: int = 8
    interval_s: float = 10.0
    start_up_s: float = 60.0
    down_after_s: float = 300.0
    headroom: float = 0.8
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["human", "json"] = "human"


@dataclass(frozen=True, slots=True)
class ReplayArgs:
    """`quire replay`."""

    model: str | None = None
    cpu_isa: Literal[
        "auto", "recorded", "reference",
        "scalar", "avx2", "avx512_bw", "avx512_vnni", "avx512", "amx", "neon", "neon_i8mm",
    ] = "recorded"  # fmt: skip
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    json: bool = False

"""Flags from data: the fields of `quire.args` become parameters of Typer commands and keys of a TOML file.

The settings of `quire run`, `chat`, `plan` and `autoscale` that are not the engine's are at the end.
"""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from quire.args import Args, Setting, defaults, flag_name, make_args, settings_of
from quire.config import SchedulerConfig
from quire.errors import ConfigError, nearest

ModelArgument = Annotated[
    str | None,
    typer.Argument(help="'quill' (default), a local folder, a .gguf file, or a hub id.", show_default=False),
]
ON_DEMAND = ("model_memory", "pin", "keep_alive_s", "load_timeout_s")  # settings of `quire serve A B`
# Settings of the engine that the help of `quire run` and `quire chat` shows.
FEW = ("quantize", "lora", "max_model_len", "device", "threads", "speculate")
_SHORT_PANELS = {"Adapters": "Model", "Admin": "Server"}  # groups that --help puts together
_WIDEST = 16  # choices as wide as that stand beside the name
_WIDEST_SHORT = 45  # choices as wide as that stand in the short help
CONFIG_HELP = "TOML file with the names of the flags; flags win."


def command_with(
    *kinds: type[Any], skip: tuple[str, ...] = (), few: Collection[str] = ()
) -> Callable[[Any], Any]:
    """Decorate a command so that it takes every setting of ``kinds`` as a flag, and ``--config``.

    Where two kinds have a name in common, the flag of the first is shown, and both get the value. The function is
    called with its own parameters and ``settings``: key → value, of the settings that were given. ``few``: the settings
    that ``--help`` shows, where these are not all but the rare ones.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(function).parameters.values() if p.name != "settings"]
        every = {f.name: (f, d) for f, d in settings_with_defaults(reversed(kinds)) if f.name not in skip}
        names = dict.fromkeys(f.name for f, _ in settings_with_defaults(kinds) if f.name in every)
        rare = {n for n in names if (n not in few if few else every[n][0].rare)}
        options = [_option(*every[name], is_rare=name in rare, in_panel=not few) for name in names]
        extra = [_CONFIG, _help_all(every, rare)]

        def wrapper(**values: Any) -> None:
            values.pop("help_all")
            from_flags = {o.name: v for o in options if (v := values.pop(o.name)) not in (None, [])}
            path = values.pop("config")
            from_file = read_toml(path, kinds) if path is not None else {}
            function(**values, settings=from_file | from_flags)

        wrapper.__name__ = function.__name__
        wrapper.__doc__ = function.__doc__
        hints = get_type_hints(function, include_extras=True)
        parameters = [p.replace(annotation=hints[p.name]) for p in own] + options + extra
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[Path | None, typer.Option("--config", help=CONFIG_HELP, metavar="FILE")],
)


def _help_all(every: Mapping[str, tuple[Setting, Any]], rare: Collection[str]) -> inspect.Parameter:
    """Return the option ``--help-all`` of a command with the settings ``every``, of which ``rare`` are hidden."""

    def show(context: typer.Context, is_set: bool) -> None:
        if is_set:
            for parameter in context.command.params:
                if parameter.name in every:
                    parameter.hidden = False  # type: ignore[attr-defined]
                    parameter.help = _help(*every[parameter.name])  # type: ignore[attr-defined]
                    parameter.rich_help_panel = every[parameter.name][0].group  # type: ignore[attr-defined]
            typer.echo(context.get_help())
            raise typer.Exit

    text = f"Show {len(rare)} more, all with their whole text."
    option = typer.Option("--help-all", help=text, metavar="", is_eager=True, callback=show, hidden=not rare)
    return inspect.Parameter(
        "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option]
    )


def settings_with_defaults(kinds: Iterable[type[Any]]) -> Iterator[tuple[Setting, Any]]:
    for kind in kinds:
        known = settings_of(kind)  # type: ignore[arg-type]  # mypy: type[Any] is not hashable
        for key, default in defaults(kind).items():
            yield known[key], default


def _option(spec: Setting, default: Any, *, is_rare: bool, in_panel: bool) -> inspect.Parameter:
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
                help=_help(spec, default, is_short=bool(spec.short)),
                rich_help_panel=_SHORT_PANELS.get(spec.group, spec.group) if in_panel else None,
                metavar=choices if 0 < len(choices) <= _WIDEST else metavar,
                hidden=is_rare,
                autocompletion=_completion(spec),
            ),
        ],
    )


def _completion(spec: Setting) -> Callable[[str], list[str]] | None:
    """Return what a shell asks for values that begin with a text, None where a setting takes any."""
    if not spec.choices:
        return None
    return lambda incomplete: [choice for choice in spec.choices if choice.startswith(incomplete)]


def _help(spec: Setting, default: Any, *, is_short: bool = False) -> str:
    # Square brackets hold the default in ``settings.toml``; in Typer's help they would be markup.
    text = (spec.short if is_short else spec.help).replace("[", "(").replace("]", ")")
    choices, widest = ", ".join(spec.choices), _WIDEST_SHORT if is_short else None
    if len("|".join(spec.choices)) > _WIDEST and (widest is None or len(choices) <= widest):
        text += f" One of {choices}."
    if default is None or default == ():
        return text
    if default is True:
        return f"{text} (on; {_negative(flag_name(spec.name), default)} turns it off)"
    return f"{text} ({'off' if default is False else default})"


def _negative(flag: str, default: Any) -> str:
    return f"--no-{flag[2:].removeprefix('enable-') if default else flag[2:]}"


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
    max_num_seqs: int = defaults(SchedulerConfig)["max_num_seqs"]
    long_prefill_token_threshold: int = 0
    draft: str | None = None
    objective: Literal["throughput", "latency", "cost"] = "throughput"
    api_price: float | None = None
    people: float = 0.0
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

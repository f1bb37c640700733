"""How `quire` and its commands look from a shell: groups of commands, short help, the nearest option, completion."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from quire.cli.foreign import foreign_flags
from quire.cli.table import from_table

# Panel of ``quire --help`` → its commands, those that most people need first.
PANELS = {
    "Start here": ("serve", "run", "chat", "doctor"),
    "Models": ("pull", "list", "rm", "quantize"),
    "Before you rent or change something": ("plan", "profile", "simulate", "eval", "learn"),
    "A running server": ("launch", "cockpit", "bench", "diagnose", "replay", "kv"),
    "Many servers": ("gateway", "autoscale", "keys", "ledger"),
    "This program": ("version",),
}
# Groups of commands, which are imported when they are typed or listed.
LATE = ("bench", "profile", "eval", "quantize", "simulate", "keys", "kv", "ledger")
_PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}
MODEL_ARGUMENTS = ("model", "models")


class Commands(TyperGroup):
    """``quire`` itself. A wrong option of any command leads to the nearest one."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the panels."""
        return list(_PANEL_OF)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command: Any = _late(cmd_name) if cmd_name in LATE else super().get_command(ctx, cmd_name)
        if command is not None:
            command.rich_help_panel = _PANEL_OF[cmd_name]
        return command

    def get_help_option(self, ctx: Any) -> Any:
        return _without_type(super().get_help_option(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _nearest_option():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _nearest_option():
            return super().invoke(ctx)


class SettingsCommand(TyperCommand):
    """A command whose help has one column for names: a negative name stands in the text of its setting."""

    def get_help_option(self, ctx: Any) -> Any:
        return _without_type(super().get_help_option(ctx))

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

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Offer the options that only ``--help-all`` shows, too."""
        rare: list[Any] = [p for p in self.params if getattr(p, "hidden", False)]
        for parameter in rare:
            parameter.hidden = False
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            for parameter in rare:
                parameter.hidden = True


@cache
def _late(name: str) -> Any:
    command: Any = typer.main.get_command(from_table(name))
    command.name = name
    return command


def _without_type(option: Any) -> Any:
    """Return the option ``--help``, whose type no reader needs."""
    if option is not None:
        option.metavar = ""
    return option


@contextmanager
def _nearest_option() -> Iterator[None]:
    """Have the error of an unknown option name the option that was probably meant."""
    try:
        yield
    except Exception as error:
        # Typer has a copy of click in some versions and imports it in others, so the class has no stable name.
        option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
        if option is None or context is None or not hasattr(error, "possibilities"):
            raise
        error.possibilities = None
        error.message = _unknown_option(option, context)  # type: ignore[attr-defined]
        raise


def _unknown_option(option: str, context: Any) -> str:
    params = context.command.params
    known = {name for p in params for name in (*p.opts, *p.secondary_opts) if name.startswith("--")}
    takes_model = any(p.name in MODEL_ARGUMENTS for p in params)
    known |= {"--model"} if takes_model else set()
    is_serve = context.info_name == "serve" and takes_model
    if is_serve:
        known |= {flag for flags in foreign_flags().values() for flag in flags if flag.startswith("--")}
    close = difflib.get_close_matches(option.partition("=")[0].replace("_", "-"), known, n=1, cutoff=0.6)
    error = f"No such option: {option}."
    if not close:
        return error
    if close == ["--model"] and takes_model and not is_serve:
        return f"{error} The model is an argument: {context.command_path} MODEL"
    return f"{error} Did you mean {close[0]}?"

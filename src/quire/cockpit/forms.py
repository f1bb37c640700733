"""*Plan* and *simulate*: forms over the flags of `quire plan` and `quire simulate`, which run as they do in a terminal.

The flags come as data from the command line itself, so a form has each of them, with its help.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from nicegui import background_tasks, ui

from quire.cockpit.visitors import Visitor
from quire.cockpit.watched import Watched
from quire.executor.child_process import child_environment

_COLUMNS = 110
_MAX_CHARS = 200_000
_AT_ONCE = asyncio.Semaphore(2)
_FIRST = {
    "plan": {"model": "llama-3.1-8b", "gpu": "h100"},
    "simulate": {"hardware": "h100", "model": "llama-3.1-8b", "rate": "8"},
}
_ABOUT = {
    "plan": "Does it fit, how fast would it be, what would it cost: from formulas.",
    "simulate": "A workload through the real scheduler, cache and router, on a virtual clock.",
}


class Flag(msgspec.Struct, frozen=True):
    """One flag of a command, or its argument (``flag`` is empty)."""

    name: str
    flag: str
    help: str
    panel: str
    kind: str = "text"  # or "bool", "choice"
    choices: tuple[str, ...] = ()
    suggested: tuple[str, ...] = ()
    negative: str = ""  # of a bool that is on by default


class Commands(msgspec.Struct, frozen=True):
    """The commands that the page has forms of. ``local``: fields may name files of this machine."""

    flags: dict[str, tuple[Flag, ...]] = {}
    local: bool = False


@dataclass(slots=True)
class Filled:
    """A browser's form."""

    values: dict[str, Any]
    is_beside: bool = False
    results: list[tuple[str, str]] = field(
        default_factory=list
    )  # (command line, what it printed), newest first


def arguments_of(flags: Sequence[Flag], values: Mapping[str, Any]) -> list[str]:
    """Return the command's arguments for the fields that are filled in."""
    first, rest = [], []
    for each in flags:
        value = values.get(each.name)
        if value in (None, "", False) and not (each.negative and value is False):
            continue
        if each.kind == "bool":
            rest += [each.negative] if value is False else [each.flag] if not each.negative else []
        elif each.flag:
            rest += [each.flag, str(value)]
        else:
            first.append(str(value))
    return first + rest


def command_line(command: str, arguments: Sequence[str]) -> str:
    """Return what a terminal takes."""
    return shlex.join(["quire", command, *arguments])


async def printed(command: str, arguments: Sequence[str], *, local: bool) -> str:
    """Run a command and return what it prints, with low priority. Cancelling ends it."""
    named = [each for each in arguments if os.path.exists(each)]
    if named and not local:
        return f"{named[0]!r} is a file of the server's machine: only a page on 127.0.0.1 may name it."
    nice = [found, "-n", "10"] if (found := shutil.which("nice")) else []
    async with _AT_ONCE:
        process = await asyncio.create_subprocess_exec(
            *nice, sys.executable, "-P", "-m", "quire.cli", command, *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env=child_environment() | {"COLUMNS": str(_COLUMNS), "NO_COLOR": "1", "TERM": "dumb"},
        )  # fmt: skip
        try:
            out, _ = await process.communicate()
        finally:
            with suppress(ProcessLookupError):
                process.kill()
    return out.decode(errors="replace")[:_MAX_CHARS].rstrip()


def show_plan(watched: Watched, visitor: Visitor) -> None:
    _Form("plan", watched.commands, visitor).show()


def show_simulate(watched: Watched, visitor: Visitor) -> None:
    _Form("simulate", watched.commands, visitor).show()


class _Form:
    def __init__(self, command: str, commands: Commands, visitor: Visitor) -> None:
        self._command, self._local = command, commands.local
        self._flags = commands.flags.get(command, ())
        self._filled: Filled = visitor.kept.setdefault(command, Filled(dict(_FIRST[command])))
        self._task: asyncio.Task[None] | None = None

    def show(self) -> None:
        with ui.element("div").classes("qc-form"):
            with ui.element("div").classes("qc-panel"):
                ui.label(_ABOUT[self._command]).classes("qc-note")
                panels: dict[str, list[Flag]] = {}
                for each in self._flags:
                    panels.setdefault(each.panel, []).append(each)
                for number, (panel, flags) in enumerate(panels.items()):
                    is_open = number < 2 or any(each.name in self._filled.values for each in flags)
                    with (
                        ui.expansion(panel, value=is_open)
                        .props("dense dense-toggle header-class=qc-title")
                        .classes("full-width")
                    ):
                        for each in flags:
                            self._field(each)
            with ui.element("div"):
                self._buttons()
                self._results = ui.element("div").classes("qc-two").style("margin-top:14px")
                self._draw()

    def _field(self, flag: Flag) -> None:
        values = self._filled.values
        label = flag.name.replace("_", " ")
        made: Any
        if flag.kind == "bool":
            made = ui.checkbox(label, value=bool(values.get(flag.name, bool(flag.negative)))).props("dense")
        elif flag.kind == "choice":
            made = ui.select(["", *flag.choices], value=values.get(flag.name, ""), label=label)
        else:
            made = ui.input(label, value=values.get(flag.name, ""), autocomplete=list(flag.suggested) or None)
        made.props("outlined dense options-dense hide-bottom-space").classes(f"full-width qc-f-{flag.name}")
        made.style("margin:0 0 6px").tooltip(flag.help)
        made.on_value_change(lambda event, name=flag.name: self._change(name, event.value))
        if flag.kind == "text":
            made.on("keydown.enter", self._run)

    def _change(self, name: str, value: Any) -> None:
        self._filled.values[name] = value.strip() if isinstance(value, str) else value
        self._line.text = self._said()

    def _said(self) -> str:
        return command_line(self._command, arguments_of(self._flags, self._filled.values))

    def _buttons(self) -> None:
        with ui.element("div").classes("qc-panel"):
            with ui.row().style("gap:8px;align-items:center"):
                ui.button("Run", on_click=self._run).props("unelevated dense").style("padding:2px 16px")
                ui.button("Stop", on_click=self._stop).props("outline dense").style("padding:2px 10px")
                ui.button("Copy the command", on_click=lambda: ui.clipboard.write(self._said())).props(
                    "flat dense"
                )
                ui.switch("Beside the one before", on_change=self._draw).bind_value(
                    self._filled, "is_beside"
                ).props("dense")
                self._busy = ui.spinner(size="20px")
                self._busy.visible = False
            self._line = (
                ui.label(self._said()).classes("qc-pre qc-line").style("margin-top:8px;white-space:pre-wrap")
            )

    def _run(self) -> None:
        self._stop()
        self._task = background_tasks.create(self._finish())

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _finish(self) -> None:
        self._busy.visible = True
        try:
            arguments = arguments_of(self._flags, self._filled.values)
            said = await printed(self._command, arguments, local=self._local)
            self._filled.results = [(command_line(self._command, arguments), said), *self._filled.results[:1]]
        finally:
            if not self._busy.is_deleted:
                self._busy.visible = False
                self._draw()

    def _draw(self) -> None:
        self._results.clear()
        with self._results:
            for line, said in reversed(self._filled.results[: 2 if self._filled.is_beside else 1]):
                with ui.element("div").classes("qc-panel"):
                    ui.label(line).classes("qc-note qc-mono")
                    ui.label(said).classes("qc-pre qc-out").style("margin-top:8px")

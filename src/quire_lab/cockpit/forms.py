"""*Plan* and *simulate*: forms with units over `quire plan` and `quire simulate`, and pictures of what they answer.

The settings come as data from the command line itself, so a form has each of them; the command runs as in a terminal.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from nicegui import background_tasks, ui

from quire.executor.child_process import child_environment
from quire_lab.cockpit.fields import FIRST, LOOKS, Flag, command_arguments, in_labels
from quire_lab.cockpit.picture import PictureView
from quire_lab.cockpit.results import Request, plan_picture, simulate_picture
from quire_lab.cockpit.visitors import Visitor
from quire_lab.cockpit.watched import Failed, Watched
from quire_lab.learn.picture import Picture

_MAX_CHARS = 4000  # characters of an error
_AT_ONCE = asyncio.Semaphore(2)
_STARTS: dict[str, dict[str, Any]] = {
    "plan": {
        "model": "llama-3.1-8b", "gpu": "h100", "count": "1", "workload.prompt": "1024", "workload.answer": "256",
    },
    "simulate": {
        "hardware": "h100", "model": "llama-3.1-8b", "rate": "8", "workload.prompt": "512",
        "workload.answer": "128",
    },
}  # fmt: skip
_ABOUT = {
    "plan": "Does it fit, how fast would it be, what would it cost: from formulas.",
    "simulate": "A load through the real scheduler, cache and router, on a virtual clock.",
}
_VERB = {"plan": "Plan", "simulate": "Simulate"}


class Commands(msgspec.Struct, frozen=True):
    """The commands that the page has forms of. ``local``: fields may name files of this machine."""

    flags: dict[str, tuple[Flag, ...]] = {}
    local: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What a command has answered: a picture, or a problem."""

    line: str
    picture: Picture | None = None
    problem: str = ""


@dataclass(slots=True)
class Filled:
    """A browser's form."""

    values: dict[str, Any]
    is_beside: bool = False
    results: list[Result] = field(default_factory=list)  # newest first


def command_line(command: str, arguments: Sequence[str]) -> str:
    """Return what a terminal takes."""
    return shlex.join(["quire", command, *arguments])


async def command_picture(command: str, arguments: Sequence[str], *, local: bool) -> Picture:
    """Run a command with low priority and return its answer as a picture. Cancelling ends it.

    Raises:
        Failed: what the command says is wrong.
    """
    named = [argument for argument in arguments if os.path.exists(argument)]
    if named and not local:
        raise Failed(f"{named[0]!r} is a file of the server's machine: only a page on 127.0.0.1 may name it.")
    with tempfile.TemporaryDirectory(prefix="quire-form-") as folder:
        output, requests = Path(folder) / "said.json", Path(folder) / "requests.jsonl"
        files = ["--json"] if command == "plan" else ["--json", str(output), "--jsonl", str(requests)]
        out, problem = await _run([command, *arguments, *files])
        if command == "plan":
            output.write_bytes(out)
        try:
            summary = msgspec.json.decode(output.read_bytes())
        except (OSError, msgspec.DecodeError):
            text = (
                problem.decode(errors="replace")
                or out.decode(errors="replace")
                or "The command says nothing."
            )
            raise Failed(text.strip().removeprefix("quire: ")[-_MAX_CHARS:]) from None
        if command == "plan":
            return plan_picture(summary)
        lines = requests.read_bytes().splitlines() if requests.exists() else []
        decoder = msgspec.json.Decoder(Request)
        return simulate_picture(summary, [decoder.decode(line) for line in lines])


async def _run(arguments: Sequence[str]) -> tuple[bytes, bytes]:
    nice = [path, "-n", "10"] if (path := shutil.which("nice")) else []
    async with _AT_ONCE:
        process = await asyncio.create_subprocess_exec(
            *nice, sys.executable, "-P", "-m", "quire.cli", *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=child_environment() | {"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"},
        )  # fmt: skip
        try:
            return await process.communicate()
        finally:
            with suppress(ProcessLookupError):
                process.kill()


def show_plan(watched: Watched, visitor: Visitor) -> None:
    _Form("plan", watched.commands, visitor).show()


def show_simulate(watched: Watched, visitor: Visitor) -> None:
    _Form("simulate", watched.commands, visitor).show()


class _Form:
    def __init__(self, command: str, commands: Commands, visitor: Visitor) -> None:
        self._command, self._local = command, commands.local
        self._flags = commands.flags.get(command, ())
        self._filled: Filled = visitor.kept.setdefault(command, Filled(dict(_STARTS[command])))
        self._task: asyncio.Task[None] | None = None

    def show(self) -> None:
        with ui.element("div").classes("qc-form"):
            with ui.element("div").classes("qc-panel"):
                ui.label(_ABOUT[self._command]).classes("qc-note")
                by_name = {flag.name: flag for flag in self._flags}
                first = [by_name[name] for name in FIRST[self._command] if name in by_name]
                for flag in first:
                    self._setting(flag)
                panels: dict[str, list[Flag]] = {}
                for flag in self._flags:
                    if flag not in first:
                        panels.setdefault(flag.panel, []).append(flag)
                for panel, flags in panels.items():
                    is_open = any(self._filled.values.get(flag.name) for flag in flags)
                    with (
                        ui.expansion(f"More: {panel.lower()}", value=is_open)
                        .props("dense dense-toggle header-class=qc-title")
                        .classes("full-width")
                    ):
                        for flag in flags:
                            self._setting(flag)
            with ui.element("div").style("min-width:0"):
                self._buttons()
                self._results = ui.element("div").classes("qc-two").style("margin-top:14px")
                self._draw()

    def _setting(self, flag: Flag) -> None:
        look = LOOKS[flag.name]
        if look.parts:
            with ui.element("fieldset").classes("qc-parts"):
                ui.html(look.label, tag="legend", sanitize=False)
                for part in look.parts:
                    self._number(f"{flag.name}.{part.name}", part.label, part.unit)
            return
        values, label = self._filled.values, look.label
        made: Any
        if flag.kind == "bool":
            made = ui.checkbox(label, value=bool(values.get(flag.name, bool(flag.negative)))).props("dense")
        elif (
            choices := flag.choices
            or look.options
            or (flag.suggested if flag.name in ("gpu", "hardware") else ())
        ):
            options = {"": "default", **{choice: choice for choice in choices}}
            made = ui.select(options, value=values.get(flag.name) or "", label=label)
        elif look.is_number:
            self._number(flag.name, label, look.unit or "", flag)
            return
        else:
            made = self._text(flag, label)
        self._finish_field(made, flag.name, in_labels(flag.help, self._flags))

    def _text(self, flag: Flag, label: str) -> Any:
        look = LOOKS[flag.name]
        made = ui.input(label, value=self._filled.values.get(flag.name) or "", placeholder=look.hint)
        if look.unit:
            made.props(f'suffix="{look.unit}"')
        if flag.suggested:
            names = "".join(f'<option value="{name}"></option>' for name in flag.suggested)
            ui.html(names, tag="datalist", sanitize=False).props(f"id=qc-known-{flag.name}")
            made.props(f"list=qc-known-{flag.name}")
        made.on("keydown.enter", self._run)
        return made

    def _number(self, name: str, label: str, unit: str, flag: Flag | None = None) -> None:
        made = ui.input(label, value=self._filled.values.get(name) or "")
        made.props(f'type=number step=any min=0 suffix="{unit}"').on("keydown.enter", self._run)
        self._finish_field(made, name, "" if flag is None else in_labels(flag.help, self._flags))

    def _finish_field(self, made: Any, name: str, help_text: str) -> None:
        made.props("outlined dense options-dense hide-bottom-space stack-label")
        made.classes(f"full-width qc-f-{name.replace('.', '-')}").style("margin:0 0 6px")
        if help_text:
            made.tooltip(help_text)
        made.on_value_change(lambda event: self._change(name, event.value))

    def _change(self, name: str, value: Any) -> None:
        self._filled.values[name] = value.strip() if isinstance(value, str) else value
        self._line.text = self._said()

    def _said(self) -> str:
        return command_line(self._command, command_arguments(self._flags, self._filled.values))

    def _buttons(self) -> None:
        with ui.element("div").classes("qc-panel"):
            with ui.row().style("gap:8px;align-items:center"):
                ui.button(_VERB[self._command], on_click=self._run).props("unelevated dense").classes(
                    "qc-wide"
                )
                ui.button("Stop", on_click=self._stop).props("outline dense").classes("qc-wide")
                ui.switch("Beside the one before", on_change=self._draw).bind_value(
                    self._filled, "is_beside"
                ).props("dense")
                self._busy = ui.spinner(size="20px").props('role=status aria-label="it is computed"')
                self._busy.visible = False
            with ui.expansion("The same in a terminal").props("dense dense-toggle").classes("full-width"):
                self._line = ui.label(self._said()).classes("qc-pre qc-line").style("white-space:pre-wrap")
                ui.button("Copy", on_click=lambda: ui.clipboard.write(self._said())).props("flat dense")

    def _run(self) -> None:
        self._stop()
        self._task = background_tasks.create(self._answer())

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _answer(self) -> None:
        self._busy.visible = True
        arguments = command_arguments(self._flags, self._filled.values)
        line = command_line(self._command, arguments)
        try:
            result = Result(line, await command_picture(self._command, arguments, local=self._local))
        except Failed as error:
            result = Result(line, problem=in_labels(str(error), self._flags))
        finally:
            if not self._busy.is_deleted:
                self._busy.visible = False
        self._filled.results = [result, *self._filled.results[:1]]
        if not self._results.is_deleted:
            self._draw(reveal=True)

    def _draw(self, *_: Any, reveal: bool = False) -> None:
        self._results.clear()
        shown = self._filled.results[: 2 if self._filled.is_beside else 1][::-1]
        pictures = [answer.picture.as_dict() for answer in shown if answer.picture is not None]
        with self._results:
            for answer in shown:
                with ui.element("div").classes("qc-panel"):
                    view = PictureView()
                    if answer.picture is not None:
                        view.push(answer.picture.as_dict(), pictures)
                    else:
                        view.fail(answer.problem)
                    if reveal and answer is shown[-1]:
                        view.reveal()
            if not shown:
                ui.label(f"“{_VERB[self._command]}” shows the answer here, as pictures.").classes("qc-note")

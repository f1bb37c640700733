"""*Learn*: the simulations of `quire learn`, each a page of one picture and its controls."""

from __future__ import annotations

import asyncio
import shlex
from typing import Any

from nicegui import background_tasks, run, ui

from quire.errors import QuireError
from quire_lab.cockpit.picture import PictureView
from quire_lab.cockpit.visitors import Visitor
from quire_lab.cockpit.watched import Watched
from quire_lab.learn.registry import SIMULATIONS
from quire_lab.learn.simulation import Control, Simulation

_SETTLE_S = 0.12  # a slider that moves is drawn when it rests for so long


def show_lessons(watched: Watched, visitor: Visitor) -> None:
    """Build the list of lessons."""
    with ui.element("div").classes("qc-two qc-lessons"):
        for number, one in enumerate(SIMULATIONS.values(), start=1):
            with ui.link(target=f"/cockpit/learn/{one.name}").classes("qc-panel qc-lesson"):
                ui.label(f"{number}. {one.title}").classes("qc-name")
                ui.label(one.sentence).classes("qc-note")


async def show_learn(watched: Watched, visitor: Visitor, name: str) -> None:
    """Build the page of one lesson."""
    if name not in SIMULATIONS:
        ui.label(f"There is no lesson {name!r}.").classes("qc-error")
        return
    _Lesson(SIMULATIONS[name], visitor).show()


class _Lesson:
    def __init__(self, simulation: Simulation, visitor: Visitor) -> None:
        self._simulation = simulation
        self._values: dict[str, Any] = visitor.kept.setdefault(
            f"learn {simulation.name}", {control.name: control.default for control in simulation.controls}
        )
        self._task: asyncio.Task[None] | None = None

    def show(self) -> None:
        names = list(SIMULATIONS)
        at = names.index(self._simulation.name)
        with ui.row().style("width:100%;align-items:baseline;gap:12px;margin-bottom:10px"):
            ui.label(self._simulation.title).classes("qc-name").style("font-size:18px")
            ui.label(self._simulation.sentence).classes("qc-note").style("flex:1;min-width:200px")
            if at:
                ui.link("← before", f"/cockpit/learn/{names[at - 1]}").style("font-size:13px")
            if at + 1 < len(names):
                ui.link("next →", f"/cockpit/learn/{names[at + 1]}").style("font-size:13px")
        with ui.element("div").classes("qc-form"):
            with ui.element("div").classes("qc-panel"):
                for control in self._simulation.controls:
                    self._control(control)
                self._line = ui.label().classes("qc-pre").style("white-space:pre-wrap;margin-top:10px")
            with ui.element("div").classes("qc-panel"):
                self._view = PictureView()
        self._changed(wait_s=0.0)

    def _control(self, control: Control) -> None:
        values, label = self._values, f"{control.label}, {control.unit}" if control.unit else control.label
        made: Any
        if control.kind == "choice":
            made = (
                ui.select(list(control.choices), label=label)
                .props("outlined dense options-dense")
                .classes("full-width")
            )
        elif control.kind == "text" or control.low is None or control.high is None:
            made = ui.input(label).props("outlined dense").classes("full-width")
        else:
            with ui.row().style("width:100%;justify-content:space-between;font-size:13px;gap:0"):
                ui.label(label)
                ui.label().classes("qc-mono").bind_text_from(
                    values, control.name, backward=lambda v: f"{v:,g}"
                )
            step = control.step or (control.high - control.low) / 100
            made = ui.slider(min=control.low, max=control.high, step=step).props(
                f'dense aria-label="{label}"'
            )
        made.bind_value(values, control.name).style("margin-bottom:6px").classes(f"qc-c-{control.name}")
        made.on_value_change(lambda: self._changed(_SETTLE_S))

    def _changed(self, wait_s: float) -> None:
        if self._task is not None:
            self._task.cancel()
        arguments = [
            part
            for control in self._simulation.controls
            if (value := self._values[control.name]) != control.default
            for part in (control.flag, f"{value:g}" if isinstance(value, float) else str(value))
        ]
        self._line.text = shlex.join(["quire", "learn", self._simulation.name, *arguments])
        self._task = background_tasks.create(self._draw(wait_s))

    async def _draw(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        integers = {control.name for control in self._simulation.controls if control.kind == "int"}
        values = {
            name: int(v) if name in integers else v for name, v in self._values.items() if v not in (None, "")
        }
        try:
            picture = await run.io_bound(lambda: self._simulation.run(**values).as_dict())
        except QuireError as error:
            self._view.fail(str(error))
        else:
            if picture is not None and not self._view.is_deleted:
                self._view.push(picture)

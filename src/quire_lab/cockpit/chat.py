"""*Chat*: any model or adapter, two side by side, token by token; conversations are kept in the browser."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from nicegui import background_tasks, ui
from nicegui.element import Element

from quire_lab.cockpit.chat_request import (
    FORMS,
    SAMPLING,
    STOPPED,
    Talk,
    bar_of,
    body_of,
    chunk_event,
    end_of,
)
from quire_lab.cockpit.conversations import Keeper, begin_anew, put_back
from quire_lab.cockpit.visitors import Visitor
from quire_lab.cockpit.watched import Failed, Watched

_MOST_BY_SLIDER = 1000
_FLUSH_S = 0.04  # tokens of this time go to the browser together


class Answer(Element, component="answer.js"):
    """One answer in the browser."""

    def restart(self, settings: dict[str, Any]) -> None:
        self.run_method("restart", settings)

    def resume(self) -> None:
        """Go on behind the text that is there."""
        self.run_method("resume")

    def push(self, events: list[dict[str, Any]]) -> None:
        self.run_method("push", events)


class Pane:
    """One model and its side of the conversation."""

    def __init__(
        self,
        watched: Watched,
        visitor: Visitor,
        talk: Talk,
        index: int,
        models: list[str],
        save: Callable[[], None],
    ) -> None:
        """``save`` is called when a message is sent and when an answer has ended."""
        self._watched, self._visitor, self._talk, self._index = watched, visitor, talk, index
        self._models, self._save = models, save
        self._task: asyncio.Task[None] | None = None
        with (
            ui.element("section").classes("qc-panel").props(f'aria-label="Answers, {index + 1}"') as self.box
        ):
            self._select = ui.select(models, value=self._model() or None, on_change=self._choose).props(
                'outlined dense options-dense aria-label="Model"'
            )
            self._select.classes(f"full-width qc-model-{index}")
            self.column = ui.element("div").classes("qc-turns").style("margin-top:10px")
            self.column.props('tabindex=0 role=region aria-label="Conversation"')
        self.draw()

    def _model(self) -> str:
        """Return the model of this pane, which is one of those that are served."""
        talk, models = self._talk, self._models
        while len(talk.models) <= self._index:
            talk.models.append(models[min(self._index, len(models) - 1)] if models else "")
        if talk.models[self._index] not in models and models:
            talk.models[self._index] = models[0]
        return talk.models[self._index]

    def _choose(self, event: Any) -> None:
        self._talk.models[self._index] = event.value

    @property
    def _turns(self) -> list[dict[str, Any]]:
        return self._talk.turns[self._index]

    def draw(self) -> None:
        """Show the conversation from its beginning."""
        self._select.value = self._model() or None
        self.column.clear()
        with self.column:
            for turn in self._turns:
                self._show(turn)
            if not self._turns:
                ui.label("Ask something: the answer comes token by token, with where its time went.").classes(
                    "qc-note qc-empty"
                )

    def _show(self, turn: dict[str, Any]) -> None:
        if turn["role"] == "user":
            ui.label(turn["content"]).classes("qc-said")
            return
        answer = self._answer()
        shown = {"text": turn["content"], "think": turn.get("think"), "calls": turn.get("calls")}
        answer.push([shown, {"end": end_of(self._talk, turn)}])

    def _answer(self) -> Answer:
        answer = Answer()
        answer.on("go_on", self.go_on)
        return answer

    def stop(self) -> None:
        """Abort the running answer; what there is stays."""
        if self._task is not None:
            self._task.cancel()

    def ask(self, text: str) -> None:
        """Send a message."""
        self.stop()
        if not self._turns:
            self.column.clear()
        self._turns.append({"role": "user", "content": text})
        with self.column:
            self._show(self._turns[-1])
        self._begin()

    def again(self) -> None:
        """Make the last answer again."""
        self.stop()
        turns = self._turns
        if turns and turns[-1]["role"] == "assistant":
            turns.pop()
            self.column.remove(list(self.column)[-1])
        if turns:
            self._begin()

    def go_on(self) -> None:
        """Continue the last answer, which was cut."""
        turns = self._turns
        if turns and turns[-1]["role"] == "assistant" and (self._task is None or self._task.done()):
            answer = list(self.column)[-1]
            assert isinstance(answer, Answer)
            answer.resume()
            self._task = background_tasks.create(self._run(answer, turns, turns.pop()))

    def _begin(self) -> None:
        with self.column:
            answer = self._answer()
        answer.restart(self._talk.settings)
        self._save()
        self._task = background_tasks.create(self._run(answer, self._turns, None))

    async def _run(self, answer: Answer, turns: list[dict[str, Any]], cut: dict[str, Any] | None) -> None:
        """Stream an answer behind ``turns``; ``cut`` is the answer that it continues."""
        turn = cut or {"role": "assistant", "content": "", "think": "", "calls": []}
        messages = turns + ([{**cut}] if cut is not None else [])
        turns.append(turn)
        waiting: list[dict[str, Any]] = []
        try:
            await self._stream(answer, messages, turn, waiting, goes_on=cut is not None)
        except Failed as error:
            waiting.append({"error": str(error)})
        except asyncio.CancelledError:
            turn["finish"] = STOPPED
        waiting.append({"end": end_of(self._talk, turn)})
        if not answer.is_deleted:
            answer.push(waiting)
            if turns is self._turns:
                self._save()

    async def _stream(
        self,
        answer: Answer,
        messages: list[dict[str, Any]],
        turn: dict[str, Any],
        waiting: list[dict[str, Any]],
        *,
        goes_on: bool,
    ) -> None:
        now = asyncio.get_running_loop().time
        begin = flushed = now()
        timing: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        route: dict[str, str] = {}
        body = body_of(self._talk, self._talk.models[self._index], messages, goes_on=goes_on)
        turn["max_tokens"] = body.get("max_tokens")
        stream = self._watched.stream("/v1/chat/completions", body, self._visitor.key)
        try:
            async for chunk in stream:
                event = chunk_event(chunk)
                timing = chunk.get("timing") or timing
                route = chunk.get("route") or route
                usage = chunk.get("usage") or usage
                if event:
                    turn["content"] += event.get("text", "")
                    turn["think"] = turn.get("think", "") + event.get("think", "")
                    turn["calls"] = [*turn.get("calls", []), *event.get("calls", [])]
                    turn["finish"] = event.get("finish") or turn.get("finish")
                    waiting.append(event)
                if now() - flushed > _FLUSH_S and waiting:
                    answer.push(list(waiting))
                    waiting.clear()
                    flushed = now()
        finally:
            await stream.aclose()
        bar = bar_of(timing, 1000 * (now() - begin), usage)
        turn["num_tokens"] = timing.get("completion_tokens") or usage.get("completion_tokens")
        bar["facts"] += [[name.removeprefix("x-quire-"), value] for name, value in route.items()]
        waiting.append({"timing": bar})


async def show_chat(watched: Watched, visitor: Visitor) -> None:
    """Build the page."""
    try:
        listing = await watched.get("/v1/models", visitor.key)
        models = [card["id"] for card in listing.get("data", [])]
    except Failed:
        models = []
    is_fresh = "chat" not in visitor.kept
    talk: Talk = visitor.kept.setdefault("chat", Talk())
    if is_fresh:
        begin_anew(talk)
    panes: list[Pane] = []

    def draw() -> None:
        for pane in panes:
            pane.stop()
            pane.draw()
        keeper.save(talk)

    def begin() -> None:
        begin_anew(talk)
        draw()

    def restored(saved: Any) -> None:
        if is_fresh and not any(talk.turns):
            opened(saved)

    def opened(saved: Any) -> None:
        if put_back(talk, saved):
            draw()

    with ui.element("div").classes("qc-chat"):
        with ui.element("div"):
            with ui.element("div").classes("qc-two"):
                panes += [
                    Pane(watched, visitor, talk, index, models, lambda: keeper.save(talk))
                    for index in range(2)
                ]
            panes[1].box.bind_visibility_from(talk, "is_double")
            _writing(talk, panes, begin)
        with ui.element("div").style("align-self:start;display:grid;gap:14px"):
            with ui.element("div").classes("qc-panel"):
                keeper = Keeper(opened, restored, begin)
            _controls(talk)
    if any(talk.turns):
        keeper.save(talk)


def _writing(talk: Talk, panes: list[Pane], begin: Callable[[], None]) -> None:
    def active() -> list[Pane]:
        return panes if talk.is_double else panes[:1]

    def send() -> None:
        text = (box.value or "").strip()
        if text:
            box.value = ""
            for pane in active():
                pane.ask(text)

    def each(act: Callable[[Pane], None]) -> Callable[[], None]:
        def run() -> None:
            for pane in active():
                act(pane)

        return run

    with ui.element("div").classes("qc-panel qc-write").style("margin-top:14px"):
        box = ui.textarea(placeholder="Write a message: Enter sends, Shift+Enter begins a line")
        box.props('outlined dense autogrow autofocus aria-label="Message"').classes("full-width")
        box.on("keydown.enter.exact.prevent", send)
        box.on("keydown.esc", each(Pane.stop))
        with ui.row().style("margin-top:8px;gap:8px;align-items:center"):
            ui.button("Send", on_click=send).props("unelevated dense").classes("qc-wide")
            for name, act in (("Stop", each(Pane.stop)), ("Again", each(Pane.again)), ("New", begin)):
                ui.button(name, on_click=act).props("outline dense").classes("qc-wide")
            ui.switch("Two side by side").bind_value(talk, "is_double").props("dense")
            ui.switch("Token by token").bind_value(talk, "is_by_token").props("dense")


def _controls(talk: Talk) -> None:
    with ui.element("div").classes("qc-panel"):
        ui.html("Sampling", tag="h2", sanitize=False).classes("qc-title")
        for name, (label, _, low, high, step) in SAMPLING.items():
            if high > _MOST_BY_SLIDER:
                box = ui.number(label, min=low, max=high, step=step, format="%d").bind_value(
                    talk.settings, name
                )
                box.props("outlined dense stack-label").classes(f"full-width qc-s-{name}").style(
                    "margin:8px 0"
                )
                continue
            with ui.row().style("width:100%;justify-content:space-between;font-size:13px;gap:0"):
                ui.label(label)
                ui.label().classes("qc-mono").bind_text_from(talk.settings, name, backward=lambda v: f"{v:g}")
            ui.slider(min=low, max=high, step=step).bind_value(talk.settings, name).props(
                f'dense aria-label="{label}"'
            )
        ui.number("Seed", format="%d").bind_value(talk, "seed").props("outlined dense clearable").classes(
            "full-width"
        )
        ui.html("Answer's form", tag="h2", sanitize=False).classes("qc-title").style("margin-top:12px")
        ui.select(FORMS).bind_value(talk, "form").props('outlined dense aria-label="Form"').classes(
            "full-width"
        )
        text = (
            ui.textarea("Schema or expression").bind_value(talk, "form_text").props("outlined dense autogrow")
        )
        text.classes("full-width qc-mono").style("margin-top:6px")
        text.bind_visibility_from(talk, "form", backward=lambda form: form in ("json_schema", "regex"))
        with ui.expansion("System message, tools").props("dense").classes("full-width"):
            ui.textarea("System").bind_value(talk, "system").props("outlined dense autogrow").classes(
                "full-width"
            )
            ui.textarea("Tools, as JSON").bind_value(talk, "tools").props("outlined dense autogrow").classes(
                "full-width qc-mono"
            )

"""*Chat*: any model or adapter, two side by side, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from nicegui import background_tasks, ui
from nicegui.element import Element

from quire.cockpit.visitors import Visitor
from quire.cockpit.watched import Failed, Watched

_FLUSH_S = 0.04  # tokens of this time go to the browser together
SAMPLING: dict[str, tuple[str, float, float, float, float]] = {  # label, default, low, high, step
    "temperature": ("Temperature", 0.8, 0.0, 2.0, 0.05),
    "top_p": ("top_p", 1.0, 0.05, 1.0, 0.01),
    "top_k": ("top_k, 0: off", 0, 0, 200, 1),
    "min_p": ("min_p", 0.0, 0.0, 1.0, 0.01),
    "max_tokens": ("Tokens at most", 128, 1, 4096, 1),
}
FORMS = {"text": "Text", "json_object": "JSON", "json_schema": "JSON schema", "regex": "Regular expression"}


class Answer(Element, component="answer.js"):
    """One answer in the browser."""

    def restart(self, settings: dict[str, Any]) -> None:
        self.run_method("restart", settings)

    def push(self, events: list[dict[str, Any]]) -> None:
        self.run_method("push", events)


@dataclass(slots=True)
class Talk:
    """What the page keeps of a browser between two visits to the chat."""

    settings: dict[str, Any] = field(default_factory=lambda: {name: row[1] for name, row in SAMPLING.items()})
    models: list[str] = field(default_factory=list)  # of the panes
    turns: list[list[dict[str, Any]]] = field(default_factory=lambda: [[], []])  # messages, per pane
    is_double: bool = False
    is_by_token: bool = False
    seed: int | None = None
    system: str = ""
    tools: str = ""
    form: str = "text"
    form_text: str = ""


def body_of(talk: Talk, model: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the request. Raises `Failed` where tools or a schema are no JSON."""
    system = [{"role": "system", "content": talk.system}] if talk.system.strip() else []
    body: dict[str, Any] = {
        "model": model,
        "messages": [*system, *messages],
        "stream": True,
        "stream_options": {"include_usage": True},
        "timing": True,
        **{
            name: int(value) if name in ("top_k", "max_tokens") else value
            for name, value in talk.settings.items()
        },
    }
    if talk.seed is not None:
        body["seed"] = int(talk.seed)
    if talk.is_by_token:
        body |= {"logprobs": True, "top_logprobs": 20}
    if talk.tools.strip():
        body["tools"] = _json(talk.tools, "Tools")
    if talk.form == "json_object":
        body["response_format"] = {"type": "json_object"}
    elif talk.form == "json_schema":
        schema = _json(talk.form_text, "The schema")
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    elif talk.form == "regex":
        body["structured_outputs"] = {"regex": talk.form_text}
    return body


def _json(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise Failed(f"{what}: no JSON ({error}).") from None


def event_of(chunk: dict[str, Any]) -> dict[str, Any]:
    """Return what the browser draws of a chunk of a stream."""
    found: dict[str, Any] = {}
    if "error" in chunk:
        found["error"] = chunk["error"].get("message", "failed")
    for choice in chunk.get("choices", ())[:1]:
        delta = choice.get("delta") or {}
        found["text"] = delta.get("content") or ""
        found["think"] = delta.get("reasoning") or delta.get("reasoning_content") or ""
        found["calls"] = [
            {"index": call.get("index", 0), **(call.get("function") or {})}
            for call in delta.get("tool_calls") or ()
        ]
        tokens = (choice.get("logprobs") or {}).get("content") or ()
        if tokens and not found["think"] and not found["calls"]:
            found["tokens"] = [
                {
                    "token": one["token"],
                    "text": one["token"],
                    "logprob": one["logprob"],
                    "top": [
                        {"token": top["token"], "logprob": top["logprob"]} for top in one["top_logprobs"]
                    ],
                }
                for one in tokens
            ]
    return {key: value for key, value in found.items() if value}


def bar_of(timing: dict[str, Any], seen_ms: float, usage: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a request's time in ms, and facts; ``seen_ms``: as the page's process measured it whole."""
    total, first = timing.get("total_ms") or seen_ms, timing.get("first_token_ms") or 0.0
    queued = timing.get("queued_ms") or 0.0
    num_tokens = timing.get("completion_tokens") or usage.get("completion_tokens") or 0
    decode = max(0.0, total - first)
    facts = [["tokens", str(num_tokens)]]
    if decode > 0 and num_tokens > 1:
        facts.append(["tokens/s", f"{1000 * (num_tokens - 1) / decode:.1f}"])
    for key, name in (
        ("prompt_tokens", "prompt"), ("cached_tokens", "cached"), ("chunks", "chunks"), ("steps", "steps"),
        ("accepted_drafts", "accepted drafts"), ("preemptions", "preemptions"), ("seed", "seed"),
    ):  # fmt: skip
        if timing.get(key) is not None and (timing[key] or key in ("cached_tokens",)):
            facts.append([name, str(timing[key])])
    return {
        "queue": queued,
        "prefill": max(0.0, first - queued),
        "decode": decode,
        "network": max(0.0, seen_ms - total),
        "facts": facts,
    }


class Pane:
    """One model and its conversation."""

    def __init__(self, watched: Watched, visitor: Visitor, talk: Talk, index: int, models: list[str]) -> None:
        self._watched, self._visitor, self._talk, self._index = watched, visitor, talk, index
        self._task: asyncio.Task[None] | None = None
        while len(talk.models) <= index:
            talk.models.append(models[min(index, len(models) - 1)] if models else "")
        if talk.models[index] not in models and models:
            talk.models[index] = models[0]
        with ui.element("div").classes("qc-panel") as self.box:
            ui.select(models, value=talk.models[index] or None, on_change=self._choose).props(
                'outlined dense options-dense aria-label="Model"'
            ).classes(f"full-width qc-model-{index}")
            self.column = ui.element("div").classes("qc-turns").style("margin-top:10px")
            with self.column:
                for message in talk.turns[index]:
                    self._show(message)

    def _choose(self, event: Any) -> None:
        self._talk.models[self._index] = event.value

    def _show(self, message: dict[str, Any]) -> None:
        if message["role"] == "user":
            ui.label(message["content"]).classes("qc-said")
        else:
            Answer().push([{"text": message.get("content") or ""}])

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def stop(self) -> None:
        """Abort the running answer; what there is stays."""
        if self._task is not None:
            self._task.cancel()

    def clear(self) -> None:
        self.stop()
        self._talk.turns[self._index].clear()
        self.column.clear()

    def ask(self, text: str) -> None:
        """Send a message."""
        self._talk.turns[self._index].append({"role": "user", "content": text})
        with self.column:
            self._show(self._talk.turns[self._index][-1])
        self._begin()

    def again(self) -> None:
        """Make the last answer again."""
        turns = self._talk.turns[self._index]
        if turns and turns[-1]["role"] == "assistant":
            turns.pop()
            children = list(self.column)
            self.column.remove(children[-1])
        if turns:
            self._begin()

    def _begin(self) -> None:
        self.stop()
        with self.column:
            answer = Answer()
        answer.restart(self._talk.settings)
        self._task = background_tasks.create(self._run(answer))

    async def _run(self, answer: Answer) -> None:
        turns, said, calls = self._talk.turns[self._index], [], []
        waiting: list[dict[str, Any]] = []
        now = asyncio.get_running_loop().time
        begin = flushed = now()
        timing: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        route: dict[str, str] = {}
        try:
            body = body_of(self._talk, self._talk.models[self._index], turns)
            stream = self._watched.stream("/v1/chat/completions", body, self._visitor.key)
            try:
                async for chunk in stream:
                    event = event_of(chunk)
                    timing = chunk.get("timing") or timing
                    route = chunk.get("route") or route
                    usage = chunk.get("usage") or usage
                    if event:
                        said.append(event.get("text", ""))
                        calls += event.get("calls", [])
                        waiting.append(event)
                    if now() - flushed > _FLUSH_S and waiting:
                        answer.push(waiting)
                        waiting, flushed = [], now()
            finally:
                await stream.aclose()
            bar = bar_of(timing, 1000 * (now() - begin), usage)
            bar["facts"] += [[name.removeprefix("x-quire-"), said] for name, said in route.items()]
            waiting.append({"timing": bar})
        except Failed as error:
            waiting.append({"error": str(error)})
        except asyncio.CancelledError:
            waiting.append({"error": "stopped"})
        turns.append({"role": "assistant", "content": "".join(said)})
        if not answer.is_deleted:
            answer.push(waiting)


async def show_chat(watched: Watched, visitor: Visitor) -> None:
    """Build the page."""
    try:
        found = await watched.get("/v1/models", visitor.key)
        models = [card["id"] for card in found.get("data", [])]
    except Failed as error:
        ui.label(str(error)).classes("qc-error")
        models = []
    talk: Talk = visitor.kept.setdefault("chat", Talk())
    with ui.element("div").classes("qc-chat"):
        with ui.element("div"):
            with ui.element("div").classes("qc-two"):
                panes = [Pane(watched, visitor, talk, index, models) for index in range(2)]
            panes[1].box.bind_visibility_from(talk, "is_double")
            _writing(talk, panes)
        _controls(talk)


def _writing(talk: Talk, panes: list[Pane]) -> None:
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
            for name, act in (("Stop", Pane.stop), ("Again", Pane.again), ("Clear", Pane.clear)):
                ui.button(name, on_click=each(act)).props("outline dense").classes("qc-wide")
            ui.switch("Two side by side").bind_value(talk, "is_double").props("dense")
            ui.switch("Token by token").bind_value(talk, "is_by_token").props("dense")


def _controls(talk: Talk) -> None:
    with ui.element("div").classes("qc-panel").style("align-self:start"):
        ui.label("Sampling").classes("qc-title")
        for name, (label, _, low, high, step) in SAMPLING.items():
            with ui.row().style("width:100%;justify-content:space-between;font-size:13px;gap:0"):
                ui.label(label)
                ui.label().classes("qc-mono").bind_text_from(talk.settings, name, backward=lambda v: f"{v:g}")
            ui.slider(min=low, max=high, step=step).bind_value(talk.settings, name).props(
                f'dense aria-label="{label}"'
            )
        ui.number("Seed", format="%d").bind_value(talk, "seed").props("outlined dense clearable").classes(
            "full-width"
        )
        ui.label("Answer's form").classes("qc-title").style("margin-top:12px")
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

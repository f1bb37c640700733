"""What needs the admin key: a gateway's replicas, routing and tenants; and changing a running server.

Nothing is changed without an admin key, also where the server asks for none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from html import escape
from typing import Any

from nicegui import ui

from quire.clock import BEAT_S
from quire_lab.cockpit.visitors import Visitor
from quire_lab.cockpit.watched import Failed, Watched

_ACTIONS = {
    "Forget cached prefixes": "/reset_prefix_cache",
    "Drain": "/drain",
    "Take requests again": "/undrain",
}
_COLUMNS = {
    "name": "replica", "state": "state", "breaker": "breaker", "region": "region", "requests": "requests",
    "queued_tokens": "tokens that wait", "ttft_ms_per_token": "ms per prompt token", "models": "models", "why": "why",
}  # fmt: skip


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], gone: Collection[int] = ()) -> str:
    """Return a table as HTML; the rows whose numbers are in ``gone`` are grey."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' if name else "<td></td>" for name in header)
    body = ""
    for number, row in enumerate(rows):
        cells = "".join(f"<td>{escape(_said(value))}</td>" for value in row)
        body += f'<tr class="gone">{cells}</tr>' if number in gone else f"<tr>{cells}</tr>"
    head = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    return f'<table class="qc-table">{head}<tbody>{body}</tbody></table>'


def _said(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


class Sightings:
    """Since when each replica has been in its state, as far as a browser's pages have seen it."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, float | None]] = {}

    def note(self, cards: Sequence[dict[str, Any]], now_s: float) -> list[dict[str, Any]]:
        """Return the cards, with the time for which a replica is in another state than "ready"."""
        seen = []
        for card in cards:
            state, since_s = self._seen.get(card["name"], (card["state"], None))
            if state != card["state"]:
                since_s = now_s
            self._seen[card["name"]] = (card["state"], since_s)
            is_told = since_s is not None and card["state"] != "ready"
            shown_state = (
                f"{card['state']} for {now_s - since_s:.0f} s"
                if is_told and since_s is not None
                else card["state"]
            )
            seen.append({**card, "state": shown_state})
        return seen


def tables_of(backends: Any, routing: Any, limits: Any) -> list[tuple[str, str]]:
    """Return (title, table) of what a gateway says; a column or a table that would be empty is left out."""
    cards = backends["data"]
    gone = {number for number, card in enumerate(cards) if card["state"].startswith("unready")}
    shown = [key for key in _COLUMNS if any(card.get(key) not in (None, "", []) for card in cards)]
    tables = [
        (
            "Replicas",
            table([_COLUMNS[key] for key in shown], [[card[key] for key in shown] for card in cards], gone),
        )
    ]
    rows = [["policy", routing["policy"]], ["retries taken", routing["retries"]["taken"]]]
    rows += [[f"{name} is served by", names] for name, names in routing["served"].items()]
    if routing.get("regions"):
        rows += [[f"region of {name}", str(state)] for name, state in routing["regions"].items()]
    tables.append(("Routing", table(("", ""), rows)))
    quotas = limits.get("quotas", []) if limits else []
    if quotas:
        keys = list(quotas[0])
        tables.append(
            ("Keys and tenants", table(keys, [[quota.get(key) for key in keys] for quota in quotas]))
        )
    return tables


async def show_gateway(watched: Watched, visitor: Visitor) -> bool:
    """Build the tables of a gateway, which go on by themselves; return whether this is one."""
    try:
        await watched.get("/admin/backends", visitor.key)
    except Failed as error:
        if error.status not in (401, 403):
            return False
    note = ui.label().classes("qc-gone").props("role=status")
    note.visible = False
    box = ui.element("div").classes("qc-replicas")
    sightings: Sightings = visitor.kept.setdefault("replicas", Sightings())
    now_s = asyncio.get_running_loop().time

    async def fill() -> bool:
        if not watched.commands.local and visitor.admin_key is None:
            return False
        names = ("backends", "routing", "limits")
        try:
            backends, *rest = [await watched.get(f"/admin/{name}", visitor.admin_key) for name in names]
        except Failed as error:
            if not box.is_deleted:
                note.text, note.visible = f"These tables are old. {error}", True
                box.classes(add="gone")
            return False
        if not box.is_deleted:
            note.visible = False
            box.classes(remove="gone")
            box.clear()
            with box:
                for title, html in tables_of({"data": sightings.note(backends["data"], now_s())}, *rest):
                    with ui.element("div").classes("qc-panel qc-gateway"):
                        ui.html(escape(title), tag="h2", sanitize=False).classes("qc-title")
                        ui.html(html, sanitize=False)
        return True

    if await fill():
        ui.timer(BEAT_S, fill)
    else:
        note.visible = False
        with box, ui.element("div").classes("qc-panel"):
            ui.label("The replicas of a gateway are shown with its admin key.").classes("qc-note")
            _ask_key(visitor, lambda key: watched.get("/admin/backends", key))
    return True


def _ask_key(visitor: Visitor, check: Callable[[str], Awaitable[Any]]) -> None:
    async def enter() -> None:
        key = field.value.strip()
        try:
            if not key:
                raise Failed("A key is needed.")
            await check(key)
        except Failed as error:
            field.error = str(error)
        else:
            visitor.admin_key = key
            ui.navigate.reload()

    with ui.row().style("gap:8px;align-items:center"):
        field = ui.input("Admin key", password=True).props("outlined dense").classes("qc-admin-key")
        field.on("keydown.enter", enter)
        ui.button("Unlock", on_click=enter).props("outline dense").classes("qc-wide")


async def show_operate(watched: Watched, visitor: Visitor) -> None:
    """Build what changes a server; nothing where no admin surface is known."""
    if watched.admin_url is None:
        return
    with ui.expansion("Operate this server").props("dense").classes("qc-panel full-width qc-operate"):
        try:
            await watched.admin("GET", "/runtime", None)
        except Failed as error:
            if error.status != 401:
                ui.label(str(error)).classes("qc-error")
                return
        else:
            ui.label("The server has no admin key (--admin-key), so nothing can be changed here.").classes(
                "qc-note"
            )
            return
        if visitor.admin_key is None:
            _ask_key(visitor, lambda key: watched.admin("GET", "/runtime", key))
            return
        await _Operate(watched, visitor).show()


class _Operate:
    """The settings in force and the few actions of an operator."""

    def __init__(self, watched: Watched, visitor: Visitor) -> None:
        self._watched, self._visitor = watched, visitor

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            answer = await self._watched.admin(method, path, self._visitor.admin_key, body)
        except Failed as error:
            ui.notify(str(error), type="negative")
            return None
        return answer

    async def show(self) -> None:
        answer = await self._call("GET", "/runtime")
        if answer is None:
            return
        values = answer.get("runtime", answer)
        with ui.row().style("gap:8px;align-items:end"):
            for name, value in values.items():
                if type(value) in (str, int, float) and name != "object":
                    self._setting(name, value)
        ui.label("Enter sets a value; it holds from the next step on.").classes("qc-note")
        with ui.row().style("gap:8px;margin-top:8px;align-items:center"):
            for name, path in _ACTIONS.items():
                self._button(name, partial(str, path))
            field = ui.input("Request id").props("outlined dense")
            self._button("Cancel it", lambda: f"/requests/{field.value.strip()}/cancel")

    def _setting(self, name: str, value: Any) -> None:
        field = ui.input(name.replace("_", " "), value=str(value)).props("outlined dense")
        field.classes(f"qc-s-{name}").style("width:170px")
        field.on("keydown.enter", lambda: self._change(name, field.value, value))

    def _button(self, name: str, path: Callable[[], str]) -> None:
        ui.button(name, on_click=lambda: self._act(name, path())).props("outline dense").classes("qc-wide")

    async def _change(self, name: str, text: str, old: Any) -> None:
        try:
            value: Any = text if isinstance(old, str) else float(text) if "." in text else int(text)
        except ValueError:
            value = text
        answer = await self._call("PATCH", "/runtime", {name: value})
        if answer is not None:
            ui.notify(
                f"{name.replace('_', ' ')} is {answer.get('runtime', {}).get(name, value)}", type="positive"
            )

    async def _act(self, name: str, path: str) -> None:
        if await self._call("POST", path) is not None:
            ui.notify(f"{name}: done", type="positive")

"""`show_frame`: what all pages share: header, navigation, keys of the keyboard, light and dark, login by key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from nicegui import ui
from nicegui.element import Element
from nicegui.events import KeyEventArguments

from quire.clock import BEAT_S
from quire_lab.cockpit.chat import show_chat
from quire_lab.cockpit.forms import show_plan, show_simulate
from quire_lab.cockpit.learn import show_learn, show_lessons
from quire_lab.cockpit.live import show_live
from quire_lab.cockpit.presence import Presence, State
from quire_lab.cockpit.visitors import Visitor
from quire_lab.cockpit.watched import Failed, Watched

PAGES = {
    "Chat": "/",
    "Live": "/cockpit/live",
    "Plan": "/cockpit/plan",
    "Simulate": "/cockpit/simulate",
    "Learn": "/cockpit/learn",
}
Show = Callable[[Watched, Visitor], Awaitable[None] | None]
KEYS = "1 … 5 pages · / write · Esc stop · d light or dark"


class StateView(Element, component="state.js"):
    """What the header says of the server."""

    def show(self, state: State, names: str) -> None:
        self.run_method("show", {**state.as_dict(), "names": names})


async def show_frame(watched: Watched, presence: Presence, visitor: Visitor) -> None:
    """Build the page of one browser."""
    ui.add_head_html('<link rel="stylesheet" href="/cockpit/static/cockpit.css">')
    ui.colors(primary="#0b7d73")
    dark = ui.dark_mode(visitor.is_dark)
    names, problem = await _models(watched, visitor)

    def turn() -> None:
        visitor.is_dark = not dark.value
        dark.value = visitor.is_dark

    links, state_view = _header(watched, visitor, turn)

    async def look() -> None:
        state = await presence.look()
        if problem and problem != _NEEDS_KEY and not state.is_gone:
            ui.navigate.reload()  # it is back, and this page was built without it
        elif not state_view.is_deleted:
            state_view.show(state, problem or ", ".join(names))

    ui.timer(BEAT_S, look)

    def pressed(event: KeyEventArguments) -> None:
        if not event.action.keydown or event.modifiers.ctrl or event.modifiers.meta or event.modifiers.alt:
            return
        key = str(event.key)
        if key.isdigit() and 1 <= int(key) <= len(PAGES):
            ui.navigate.to(list(PAGES.values())[int(key) - 1])
        elif key == "d":
            turn()
        elif key == "/":
            ui.run_javascript("document.querySelector('.qc-write textarea')?.focus()")

    ui.keyboard(on_key=pressed)
    if problem == _NEEDS_KEY:
        _show_login(watched, visitor)
        return

    def page(path: str, show: Show) -> Callable[[], Awaitable[None]]:
        async def build() -> None:
            for link, element in links.items():
                element.classes(replace="qc-nav on" if link == path else "qc-nav")
            with ui.element("div").classes("qc-page"):
                ui.html(next(n for n, p in PAGES.items() if p == path), tag="h1", sanitize=False).classes(
                    "qc-hidden"
                )
                pending = show(watched, visitor)
                if pending is not None:
                    await pending

        return build

    async def lesson(name: str) -> None:
        await page(PAGES["Learn"], lambda watched, visitor: show_learn(watched, visitor, name))()

    shown = (show_chat, show_live, show_plan, show_simulate, show_lessons)
    routes: dict[str, Any] = {
        path: page(path, show) for path, show in zip(PAGES.values(), shown, strict=True)
    }
    ui.sub_pages(routes | {f"{PAGES['Learn']}/{{name}}": lesson}).classes("full-width")


def _header(
    watched: Watched, visitor: Visitor, turn: Callable[[], None]
) -> tuple[dict[str, Element], StateView]:
    """Build the header; return the links of the pages by path, and what shows the server's state."""
    with ui.header(elevated=False).classes("qc-head"):
        with ui.element("div").classes("qc-brand"):
            ui.element("img").props('src="/cockpit/static/quire.svg" alt=""')
            ui.label("Quire")
        links: dict[str, Element] = {
            path: ui.link(name, path).classes("qc-nav") for name, path in PAGES.items()
        }
        state_view = StateView().tooltip(f"{watched.url} · {KEYS}")
        ui.button(icon="contrast", on_click=turn).props('flat dense color=qc-soft aria-label="Light or dark"')
        if visitor.key is not None:
            leave = ui.button(icon="logout", on_click=lambda: _leave(visitor))
            leave.props('flat dense color=qc-soft aria-label="Log out"')
    return links, state_view


_NEEDS_KEY = "a key is needed"


async def _models(watched: Watched, visitor: Visitor) -> tuple[list[str], str]:
    """Return the served names, and what is wrong."""
    try:
        listing: dict[str, Any] = await watched.get("/v1/models", visitor.key)
    except Failed as error:
        return [], _NEEDS_KEY if error.status in (401, 403) else str(error)
    return [card["id"] for card in listing.get("data", [])], ""


def _leave(visitor: Visitor) -> None:
    visitor.key = visitor.admin_key = None
    ui.navigate.reload()


def _show_login(watched: Watched, visitor: Visitor) -> None:
    async def enter() -> None:
        before, visitor.key = visitor.key, field.value.strip()
        _, problem = await _models(watched, visitor)
        if problem:
            visitor.key = before
            field.error = "The server does not take this key." if problem == _NEEDS_KEY else problem
        else:
            ui.navigate.reload()

    with (
        ui.element("div").classes("qc-page"),
        ui.element("div").classes("qc-panel qc-login"),
    ):
        ui.html("This server asks for a key", tag="h1", sanitize=False).classes("qc-name")
        field = ui.input("API key", password=True).props("outlined dense autofocus").classes("full-width")
        field.on("keydown.enter", enter)
        ui.button("Log in", on_click=enter).props("unelevated").style("margin-top:8px")
        ui.label("It is kept in the memory of the page's process and sent to the server alone.").classes(
            "qc-note"
        )

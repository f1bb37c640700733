"""*Live*: what the engine does now, drawn in the browser from the messages of ``/engine/live``."""

from __future__ import annotations

import asyncio
from typing import Any

from nicegui import background_tasks, ui
from nicegui.element import Element

from quire.clock import RETRY_S
from quire_lab.cockpit.operate import show_gateway, show_operate
from quire_lab.cockpit.readings import Readings
from quire_lab.cockpit.visitors import Visitor
from quire_lab.cockpit.watched import Failed, Watched


class LivePicture(Element, component="live.js"):
    """The picture in the browser."""

    def push(self, message: str, reading: dict[str, Any]) -> None:
        self.run_method("push", message, reading)

    def say(self, text: str) -> None:
        self.run_method("say", text)

    def quiet(self, text: str) -> None:
        """Show the figures as old: in grey, with the time that they are of."""
        self.run_method("quiet", text)


async def show_live(watched: Watched, visitor: Visitor) -> None:
    """Build the page; it follows the engine, or one replica of a gateway, while a browser shows it."""
    if not await show_gateway(watched, visitor):
        background_tasks.create(_follow(LivePicture(), watched, visitor, None))
        await show_operate(watched, visitor)
        return
    urls = await _replicas(watched, visitor)
    if not urls:
        return
    box = ui.element("div")

    def choose(url: str) -> None:
        box.clear()
        with box:
            background_tasks.create(_follow(LivePicture(), watched, visitor, url))

    ui.select(
        urls, value=next(iter(urls)), label="Watch a replica", on_change=lambda event: choose(event.value)
    ).props("outlined dense options-dense").style("max-width:420px;margin-bottom:12px")
    box.move(target_index=-1)
    choose(next(iter(urls)))


async def _replicas(watched: Watched, visitor: Visitor) -> dict[str, str]:
    """Return the replicas of a gateway that are ready, URL → name."""
    try:
        backends = await watched.get("/admin/backends", visitor.admin_key)
    except Failed:
        return {}
    return {card["url"]: card["name"] for card in backends["data"] if card["state"] == "ready"}


async def _follow(picture: LivePicture, watched: Watched, visitor: Visitor, url: str | None) -> None:
    readings = Readings()
    while not picture.is_deleted:
        if picture.client.has_socket_connection:
            try:
                stream = watched.live(visitor.key, at=url)
                try:
                    async for message in stream:
                        if picture.is_deleted or not picture.client.has_socket_connection:
                            break
                        if message:
                            picture.push(message, readings.take(message))
                        else:
                            picture.quiet("The engine does not answer.")
                finally:
                    await stream.aclose()
            except Failed as error:
                if error.status == 404:
                    picture.say("This server has no live feed.")
                    return
                picture.quiet(str(error))
        await asyncio.sleep(RETRY_S)

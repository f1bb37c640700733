"""*Live*: what the engine does now, drawn in the browser from the messages of ``/engine/live``."""

from __future__ import annotations

import asyncio

from nicegui import background_tasks
from nicegui.element import Element

from quire.cockpit.visitors import Visitor
from quire.cockpit.watched import Failed, Watched

_AGAIN_S = 1.0


class LivePicture(Element, component="live.js"):
    """The picture in the browser."""

    def push(self, message: str) -> None:
        self.run_method("push", message)

    def say(self, text: str) -> None:
        self.run_method("say", text)


async def show_live(watched: Watched, visitor: Visitor) -> None:
    """Build the page; it follows the engine while a browser shows it."""
    picture = LivePicture()
    background_tasks.create(_follow(picture, watched, visitor))


async def _follow(picture: LivePicture, watched: Watched, visitor: Visitor) -> None:
    while not picture.is_deleted:
        if picture.client.has_socket_connection:
            try:
                stream = watched.live(visitor.key)
                try:
                    async for message in stream:
                        if picture.is_deleted or not picture.client.has_socket_connection:
                            break
                        picture.push(message)
                finally:
                    await stream.aclose()
            except Failed as error:
                if error.status == 404:
                    picture.say("This server has no live feed.")
                    return
                picture.say(str(error))
            except (TimeoutError, OSError):
                picture.say("The server does not answer.")
        await asyncio.sleep(_AGAIN_S)

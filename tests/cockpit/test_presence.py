"""A server that is gone is shown as gone, since its last answer; one that is ill says why."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("nicegui", reason="the extra `cockpit` is not installed")

from quire_lab.cockpit.presence import Presence
from quire_lab.cockpit.watched import Failed


class Scripted:
    """Answers as it is told to; ``now`` is the time."""

    def __init__(self) -> None:
        self.says: Any = {"status": "ready"}
        self.now = 1000.0
        self.asked = 0

    async def ready(self) -> Any:
        self.asked += 1
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


def test_a_server_is_gone_since_its_last_answer() -> None:
    async def main() -> None:
        server = Scripted()
        presence = Presence(server, lambda: server.now)  # type: ignore[arg-type]
        assert (await presence.look()).status == "ready"
        server.now = 1010.0
        await presence.look()
        server.says, server.now = Failed("refused"), 1012.5
        state = await presence.look()
        assert (state.is_gone, state.since, state.text) == (True, 1010.0, "refused")
        server.now = 1100.0
        assert (await presence.look()).since == 1010.0
        server.says, server.now = {"status": "ready"}, 1103.0
        state = await presence.look()
        assert (state.status, state.since) == ("ready", 1103.0)

    asyncio.run(main())


def test_a_server_that_never_answered_is_gone_since_the_first_look() -> None:
    async def main() -> None:
        server = Scripted()
        server.says, server.now = Failed("refused"), 5.0
        assert (await Presence(server, lambda: server.now).look()).since == 5.0  # type: ignore[arg-type]

    asyncio.run(main())


def test_what_a_server_says_of_its_engine_is_shown() -> None:
    async def main() -> None:
        server = Scripted()
        server.says = {"status": "hung", "reason": "step 7 is late"}
        state = await Presence(server, lambda: server.now).look()  # type: ignore[arg-type]
        assert (state.status, state.text) == ("hung", "does not compute: step 7 is late")

    asyncio.run(main())


def test_many_pages_ask_once() -> None:
    async def main() -> None:
        server = Scripted()
        presence = Presence(server, lambda: server.now)  # type: ignore[arg-type]
        await asyncio.gather(*(presence.look() for _ in range(20)))
        assert server.asked == 1

    asyncio.run(main())

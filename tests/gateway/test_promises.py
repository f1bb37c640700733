"""A request that comes back at its `Retry-After` goes to the backend that holds a place for it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from tests.gateway.live import Received, Script, Scripted, answer, gateway, says

from quire.clock import VirtualClock
from quire_gateway import promises
from quire_gateway.asked import Asked
from quire_gateway.promises import GRACE_S, Promises

ASKED = Asked("/v1/completions", b"{}", {}, "m", False, b"", 1, b"")
OTHER = replace(ASKED, raw=b"{ }")


def test_equal_requests_share_the_times_told() -> None:
    clock = VirtualClock()
    kept = Promises(clock.now)
    kept.told(ASKED, "lab", "b", 5.0)
    kept.told(ASKED, "lab", "a", 3.0)
    kept.told(OTHER, "lab", "c", 3.0)
    assert kept.backend_of(ASKED, "lab") is None  # too early
    clock.advance(3.0)
    assert kept.backend_of(ASKED, "other") is None
    assert kept.backend_of(ASKED, "lab") == "a"
    assert kept.backend_of(ASKED, "lab") is None  # the other one is due later
    assert kept.backend_of(OTHER, "lab") == "c"
    clock.advance(2.0 + GRACE_S - 0.1)
    assert kept.backend_of(ASKED, "lab") == "b"
    assert kept._dues == {}


def test_a_place_is_held_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promises, "MAX_PROMISES", 2)
    clock = VirtualClock()
    kept = Promises(clock.now)
    for name in "abc":  # one too many
        kept.told(ASKED, "lab", name, 1.0)
    clock.advance(1.0 + GRACE_S + 0.1)
    kept.told(OTHER, "lab", "d", 0.0)  # the others' time is over
    assert kept.backend_of(ASKED, "lab") is None
    assert kept.backend_of(OTHER, "lab") == "d"


def full_until_back(seconds: int) -> Script:
    """Refuse a request with a time, and serve it when it comes back."""
    told: list[bytes] = []

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.raw in told:
            await says("hello")(request, writer)
            return
        told.append(request.raw)
        await answer(writer, 503, b"{}", {"retry-after": str(seconds)})

    return script


def test_a_refused_request_is_served_when_it_comes_back() -> None:
    """Of seven requests at two full backends each goes to the one that has promised it a place, whoever is next."""
    backends = [Scripted(full_until_back(1)) for _ in range(2)]

    async def run() -> None:
        async with gateway(*backends, retries={"attempts": 1}, routing={"policy": "round-robin"}) as live:
            bodies = [{"model": "m", "prompt": f"prompt {i}"} for i in range(7)]
            for body in bodies:
                assert (await live.post(body))[0] == 503
                assert live.headers["retry-after"] == "1"
            await asyncio.sleep(1.0)
            assert [(await live.post(body))[0] for body in bodies] == [200] * 7

    asyncio.run(run())
    assert all(backend.received for backend in backends)


def test_no_503_is_without_its_time() -> None:
    async def full(request: Received, writer: asyncio.StreamWriter) -> None:
        await answer(writer, 503, json.dumps({"error": "full"}).encode())

    async def run() -> None:
        async with gateway(Scripted(full)) as live:
            status, said = await live.post({"model": "m", "prompt": "hi"})
            assert (status, live.headers["retry-after"]) == (503, "1")
            assert said == b'{"error": "full"}'

    asyncio.run(run())

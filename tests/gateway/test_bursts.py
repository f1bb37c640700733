"""Bursts at the gateway: connects are bounded, a late loop blames no backend, probes are answered beside it all."""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import pytest
from tests.e2e.live import LiveServer
from tests.gateway.live import Scripted, gateway, says

from quire.errors import CapacityError
from quire_gateway import openings
from quire_gateway.health import Poller, PollFailure
from quire_gateway.openings import Openings
from quire_gateway.patience import lasting
from quire_gateway.upstream import BackendFailed, failures


def test_a_late_loop_ends_no_attempt() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)

            def hold_the_loop() -> None:
                time.sleep(0.3)
                theirs.send(b"x")

            loop.call_later(0.02, hold_the_loop)
            async with lasting(0.1):
                assert await loop.sock_recv(ours, 1) == b"x"

    asyncio.run(run())


def test_an_attempt_ends_when_the_loop_keeps_up() -> None:
    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with lasting(0.08):
                await asyncio.sleep(3600)

    asyncio.run(run())


def test_connections_are_opened_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PER_BACKEND", 2), ("IN_ALL", 3), ("MAX_WAITING", 4)):
        monkeypatch.setattr(openings, name, value)
    opening, most = dict.fromkeys("ab", 0), dict.fromkeys("ab", 0)
    most_in_all = 0
    order: list[str] = []

    async def run() -> list[Any]:
        gate = asyncio.Event()

        async def connect(self: Any, req: Any, traces: Any, timeout: Any) -> Any:
            nonlocal most_in_all
            key = req.connection_key
            opening[key] += 1
            most[key] = max(most[key], opening[key])
            most_in_all = max(most_in_all, sum(opening.values()))
            order.append(req.name)
            await gate.wait()
            opening[key] -= 1

        monkeypatch.setattr(aiohttp.TCPConnector, "_create_connection", connect)
        connector = Openings(5.0, 60.0)

        async def one(name: str) -> Any:
            request: Any = SimpleNamespace(connection_key=name[0], name=name)
            return await connector._create_connection(request, [], aiohttp.ClientTimeout())

        tasks = []
        for name in ("a1", "a2", "a3", "a4", "b1", "b2", "b3", "a5"):
            tasks.append(asyncio.create_task(one(name)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        gate.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        await connector.close()
        assert connector.num_waiting == 0
        return found

    found = asyncio.run(run())
    assert most["a"] == 2
    assert most_in_all == 3
    assert [name for name in order if name[0] == "a"] == ["a1", "a2", "a3", "a4"]
    assert [type(each) for each in found] == [type(None)] * 7 + [CapacityError]


def test_polls_do_not_wait_behind_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openings, "PER_BACKEND", 1)

    async def run() -> None:
        async with gateway(Scripted(says("hello")), health={"interval_s": 30.0}) as live:
            (backend,) = live.state.fleet
            connector = live.state.upstream._requests.connector
            assert isinstance(connector, Openings)
            held = asyncio.Event()

            async def never(*rest: Any, **more: Any) -> Any:
                await held.wait()
                raise OSError("held")

            connector._wrap_create_connection = never  # type: ignore[method-assign]
            waiting = [asyncio.create_task(live.post({"model": "m", "prompt": "hi"})) for _ in range(3)]
            await live.until(lambda: connector.num_waiting == 2)
            assert (await live.state.upstream.get(f"{backend.url}/readyz", 5.0)).status == 200
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            await live.until(lambda: not live.state.num_open)
            assert connector.num_waiting == 0

    asyncio.run(run())


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EADDRNOTAVAIL])
def test_a_lack_of_files_or_ports_is_no_fault_of_a_backend(number: int) -> None:
    key: Any = SimpleNamespace(host="h", port=1, ssl=True, is_ssl=False)
    with pytest.raises(BackendFailed, match="can open no connection") as failed, failures():
        raise aiohttp.ClientConnectorError(key, OSError(number, "none left"))
    assert (failed.value.kind, failed.value.tells_of_load) == ("room", True)


def test_without_room_the_answer_is_503_with_its_time() -> None:
    """The backend stays ready, and no other one is tried."""

    async def run() -> None:
        async with gateway(Scripted(says("hello")), Scripted(says("hello"))) as live:
            asked = []

            async def no_room(session: Any, method: str, *rest: Any) -> Any:
                asked.append(method)
                raise BackendFailed("room", "no room")

            live.state.upstream._ask = no_room  # type: ignore[method-assign]
            status, _ = await live.post({"model": "m", "prompt": "hi"})
            assert (status, live.headers["retry-after"]) == (503, "1")
            assert asked.count("POST") == 1
            await live.until(lambda: asked.count("GET") >= 4)  # polls, which fail in the same way
            assert all(b.is_ready for b in live.state.fleet)
            assert all(b.breaker.state(live.state.now()) == "closed" for b in live.state.fleet)

    asyncio.run(run())


def test_a_poll_without_room_says_nothing_of_a_backend() -> None:
    async def run() -> None:
        async with gateway(Scripted(says("hello"))) as live:
            poller = Poller(live.state.fleet, Random(0), live.state.now)

            class NoRoom:
                async def get(self, *rest: Any) -> Any:
                    raise BackendFailed("room", "no room")

            poller._upstream = NoRoom()  # type: ignore[assignment]
            (backend,) = live.state.fleet
            assert await poller.poll(backend, lists=False) is None
            backend.is_ready = False
            assert await poller.poll(backend, lists=False) == PollFailure("no room")

    asyncio.run(run())


def test_probes_are_answered_while_the_gateway_is_held(tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text('port = 0\n[[backends]]\nurl = "http://127.0.0.1:9"\n')
    command = ["-m", "quire.cli", "gateway", "--config", str(config)]
    server = LiveServer(command, tmp_path / "log", ready=r"listening url=(\S+)")
    try:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            deadline_s = time.monotonic() + 60
            while True:
                try:
                    assert client.get("/livez").json() == {"status": "alive"}
                    break
                except httpx.ConnectError:
                    assert time.monotonic() < deadline_s
                    time.sleep(0.05)
            assert client.get("/readyz").status_code == 503
            server.process.send_signal(signal.SIGSTOP)
            try:
                assert client.get("/livez").status_code == 200
                assert client.get("/readyz").json() == {"status": "starting"}
            finally:
                server.process.send_signal(signal.SIGCONT)
            assert client.get("/v1/models").status_code == 200  # handed over
    finally:
        assert server.stop() == 0

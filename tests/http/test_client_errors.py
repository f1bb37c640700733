"""Why another server does not answer, in words."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from quire.http.client_errors import connection_problem


async def failure_of(url: str, **options: float) -> str:
    timeout = aiohttp.ClientTimeout(**(options or {"total": 30.0}))
    async with aiohttp.ClientSession(timeout=timeout) as session:
        with pytest.raises((aiohttp.ClientError, TimeoutError)) as error:
            async with session.get(url) as answer:
                await answer.read()
    return connection_problem(error.value)


async def answered(raw: bytes) -> str:
    """Return what is said of a server that answers ``raw`` and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        return await failure_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")


def test_nothing_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        said = asyncio.run(failure_of(f"http://127.0.0.1:{free.getsockname()[1]}/"))
    assert said == "does not answer: nothing listens there (is the server up?)"


def test_a_server_that_says_nothing_is_late() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = asyncio.run(failure_of(f"http://127.0.0.1:{silent.getsockname()[1]}/", sock_read=0.2))
    assert said == "does not answer in time"


def test_a_connection_that_ends() -> None:
    whole = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf"
    for raw in (b"", whole):
        assert asyncio.run(answered(raw)) == "closed the connection before its answer had ended"


def test_something_else_than_http() -> None:
    assert asyncio.run(answered(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")).startswith("does not answer in HTTP: ")


def test_names_and_addresses() -> None:
    key = None
    unknown = aiohttp.ClientConnectorError(key, socket.gaierror(-2, "Name or service not known"))  # type: ignore[arg-type]
    assert connection_problem(unknown) == "does not answer: its name is not known"
    assert connection_problem(aiohttp.InvalidURL("x")).startswith("is no address")

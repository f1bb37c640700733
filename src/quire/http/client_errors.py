"""`connection_problem`: what became of a request to another server, in words that say where to look."""

from __future__ import annotations

import socket

import aiohttp


def connection_problem(error: Exception) -> str:
    """Return a phrase that goes on after the server's address: "does not answer: …", "closed the connection"."""
    if isinstance(error, TimeoutError):  # aiohttp's of connecting and of reading, and asyncio's
        return "does not answer in time"
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientConnectorSSLError):
        return f"cannot be reached over TLS: {error.__cause__ or error}"
    if isinstance(error, aiohttp.ClientConnectorError):
        return _not_connected(error.os_error)
    if isinstance(error, aiohttp.InvalidURL):
        return "is no address; one looks like http://127.0.0.1:8000"
    if isinstance(
        error,
        aiohttp.ServerDisconnectedError
        | aiohttp.ClientPayloadError
        | aiohttp.ClientOSError
        | ConnectionError,
    ):
        return "closed the connection before its answer had ended"
    if isinstance(error, aiohttp.ClientResponseError):
        return f"does not answer in HTTP: {error.message}"
    return f"does not answer: {type(error).__name__}: {error}".rstrip(": ")


def _not_connected(error: OSError) -> str:
    match error:
        case ConnectionRefusedError():
            return "does not answer: nothing listens there (is the server up?)"
        case socket.gaierror():
            return "does not answer: its name is not known"
        case FileNotFoundError():
            return "does not answer: there is no such socket (is the server up?)"
    return f"does not answer: {error.strerror or error}"

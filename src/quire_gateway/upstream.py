"""`Upstream`: HTTP to backends, over one pool of connections. Every failure is a `BackendFailed`."""

from __future__ import annotations

import errno
import io
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import aiohttp
from aiohttp.http_exceptions import ContentEncodingError

from quire.errors import CapacityError, QuireError
from quire.http.front import KEEP_ALIVE_S as SERVER_KEEP_ALIVE_S
from quire.http.limits import INLINE_BYTES
from quire.units import PIECE_BYTES
from quire_gateway.headers import Pairs, to_client
from quire_gateway.openings import Openings
from quire_gateway.patience import lasting

# connect: no connection; broken: it ended early; timeout: too late; status: an answer that says so; garbage: no valid
# answer; room: this process can open no connection, which says nothing of the backend; unready: withdrawn, since polls
# found the backend dead or hung.
FailureKind = Literal["connect", "broken", "timeout", "status", "garbage", "room", "unready"]
# Of this machine: files, local ports, memory.
_NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ENOMEM))
RETRIED_STATUS = frozenset((429, 500, 502, 503))  # of an answer that another backend may give better
# Less than the server's, so that a connection is not closed while a request is on its way.
KEEP_ALIVE_S = 0.8 * SERVER_KEEP_ALIVE_S
READ_BYTES = 64 * 1024  # at once, and the most that one header of an answer has
_CODINGS = frozenset(("", "identity", "gzip", "deflate", "br", "zstd"))  # that aiohttp decodes
# For a question to a backend that no client waits for alone.
ASIDE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Pairs
    body: bytes


class BackendFailed(QuireError):
    """A backend gave no good answer. ``answer``: what it said instead, if anything."""

    def __init__(self, kind: FailureKind, message: str, answer: Reply | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.answer = answer

    @property
    def timed_out(self) -> bool:
        """Whether nothing came in time, be it a connection or an answer."""
        return isinstance(self.__cause__, TimeoutError)

    @property
    def tells_of_load(self) -> bool:
        """Whether the failure is no fault of the backend: it has no room, or this process has none."""
        return self.kind == "room" or (self.answer is not None and self.answer.status in (429, 503))

    @property
    def blames_backend(self) -> bool:
        """Whether the breaker counts it: not load, not what is the client's fault, not what polls know already."""
        if self.kind in ("unready", "room"):
            return False
        return self.answer is None or (self.answer.status >= 500 and not self.tells_of_load)

    @property
    def tells_of_death(self) -> bool:
        """Whether the backend is dead or hung rather than wrong: other requests there fare alike."""
        return self.kind in ("connect", "broken", "unready")


class Upstream:
    """The client side of the gateway. Made in the loop that serves.

    Polls have connections of their own: the requests that wait for one do not hold them up.
    """

    def __init__(self, connect_s: float) -> None:
        self._requests, self._polls = (_session(Openings(connect_s, KEEP_ALIVE_S)) for _ in range(2))

    async def open(
        self, method: str, url: str, headers: Sequence[tuple[str, str]], body: bytes | None
    ) -> aiohttp.ClientResponse:
        """Send a request and return its answer once the head is there; the caller closes it.

        Raises:
            BackendFailed: no connection, or no valid head.
        """
        return await self._ask(self._requests, method, url, headers, body)

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        method: str,
        url: str,
        headers: Sequence[tuple[str, str]],
        body: bytes | None,
    ) -> aiohttp.ClientResponse:
        with failures():
            data = body if body is None or len(body) <= PIECE_BYTES else io.BytesIO(body)
            response = await session.request(method, url, headers=headers, data=data, allow_redirects=False)
        coding = response.headers.get("content-encoding", "identity").lower()
        if coding not in _CODINGS:
            response.close()
            raise BackendFailed(
                "garbage", f"The backend's answer has the content-encoding {coding!r}, which cannot be read."
            )
        return response

    async def get(
        self, url: str, timeout_s: float, api_key: str | None = None, extra: Sequence[tuple[str, str]] = ()
    ) -> Reply:
        """Return a small answer, as of a probe.

        Raises:
            BackendFailed: there was none within ``timeout_s``.
        """
        headers = [*extra, *([("authorization", f"Bearer {api_key}")] if api_key is not None else [])]
        with failures():
            async with lasting(timeout_s):
                response = await self._ask(self._polls, "GET", url, headers, None)
                with closing(response):
                    return await read_reply(response, INLINE_BYTES)

    async def close(self) -> None:
        await self._requests.close()
        await self._polls.close()


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=True,  # no coding is asked for, and some backends use one in any case
        read_bufsize=READ_BYTES,
        max_line_size=READ_BYTES,
        max_field_size=READ_BYTES,
        timeout=aiohttp.ClientTimeout(total=None),
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
    )


async def read_reply(response: aiohttp.ClientResponse, max_bytes: int) -> Reply:
    """Read an answer to its end.

    Raises:
        BackendFailed: it ends early, or has more than ``max_bytes``.
    """
    pieces, size = [], 0
    with failures():
        async for piece in response.content.iter_any():
            size += len(piece)
            if size > max_bytes:
                raise BackendFailed(
                    "garbage", f"The answer has more than {max_bytes} bytes (max_answer_mib)."
                )
            pieces.append(piece)
    return Reply(response.status, to_client(response.raw_headers), b"".join(pieces))


@contextmanager
def failures() -> Generator[None, None, None]:
    """Turn what goes wrong with a connection into `BackendFailed`."""
    try:
        yield
    except TimeoutError as error:  # aiohttp's are TimeoutErrors, too
        kind: FailureKind = "connect" if isinstance(error, aiohttp.ConnectionTimeoutError) else "timeout"
        raise BackendFailed(kind, "The backend did not answer in time.") from error
    except CapacityError as error:
        raise BackendFailed("room", str(error)) from error
    except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
        if isinstance(error, aiohttp.ClientConnectorError) and error.errno in _NO_ROOM:
            raise BackendFailed("room", f"The gateway can open no connection: {error.strerror}.") from error
        raise BackendFailed("connect", f"No connection to the backend: {error}.") from error
    except (aiohttp.ClientResponseError, ValueError) as error:  # a head beyond its limits, or none at all
        raise BackendFailed("garbage", f"The backend's answer is not HTTP: {_short(error)}.") from error
    except (aiohttp.ClientError, OSError) as error:
        if isinstance(error.__cause__, ContentEncodingError):
            raise BackendFailed("garbage", f"{error.__cause__.message} of the backend's answer.") from error
        raise BackendFailed("broken", f"The backend ended the connection early: {_short(error)}.") from error


@contextmanager
def closing(response: aiohttp.ClientResponse) -> Generator[None, None, None]:
    """Close an answer that was not read to its end: the backend then stops working on it."""
    try:
        yield
    finally:
        response.close()  # without effect after the end, when the connection is in the pool again


def _short(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__

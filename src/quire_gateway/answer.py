"""`Answer`: what the client of one request gets, and the steps that change it on its way."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.types import Send

from quire_gateway.headers import Pairs


class AnswerStep:
    """Changes one answer. A stage adds it with `Answer.through`; it keeps what it needs of the stream."""

    def answered_by(self, backend: str) -> None:
        """The backend of this name begins the answer. One that continues it later is not told."""

    def restart(self) -> None:
        """The client has nothing yet, and another attempt begins the answer."""

    async def events(self, frames: bytes) -> bytes:
        """Take whole events of a stream; return those that may go on. `check` follows."""
        return frames

    async def ended(self, rest: bytes) -> bytes:
        """The stream has ended with ``rest``; return all that is left. `check` follows."""
        return await self.events(rest)

    def check(self) -> None:
        """Raise `HttpError` if what follows is refused."""

    async def document(self, status: int, content_type: str, body: bytes) -> bytes:
        """Return the body of a whole answer, an error among them. Raises `HttpError` if it is refused."""
        return body


@dataclass(slots=True, eq=False)
class Answer:
    """The answer to one client."""

    send: Send
    headers: Pairs = field(default_factory=list)  # from the gateway
    route_headers: Pairs = field(default_factory=list)  # from the last attempt
    steps: list[AnswerStep] = field(default_factory=list)
    has_begun: bool = False  # bytes went to the client
    status: int = 0
    first_s: float | None = None  # clock time of the first bytes from a backend
    is_writing: bool = False  # waits for the client to take bytes

    def through(self, step: AnswerStep) -> None:
        """Have the answer pass ``step``, ahead of the steps that it passes already."""
        self.steps.insert(0, step)

    def answered_by(self, backend: str) -> None:
        """A backend has begun the answer, or continues it."""
        if not self.has_begun:
            for step in self.steps:
                step.answered_by(backend)

    def restart(self) -> None:
        """The client has nothing yet, and the next attempt begins the answer."""
        self.first_s = None
        for step in self.steps:
            step.restart()

    async def begin(self, status: int, headers: Pairs) -> None:
        """Send the head of the answer; from now on no other backend can answer instead."""
        self.has_begun = True
        self.status = status
        await self.send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, *self.headers, *self.route_headers],
            }
        )

    async def relay(self, frames: bytes) -> bytes:
        """Return what the client gets of whole events from a backend; `write` sends it."""
        for step in self.steps:
            frames = await step.events(frames)
        return frames

    async def finish(self, rest: bytes) -> bytes:
        """The backend's stream has ended; return what the client gets of its ``rest``."""
        for step in self.steps:
            rest = await step.ended(rest)
        return rest

    async def write(self, data: bytes) -> None:
        """Send a part of a stream. Raises `HttpError` if a step refused what follows it."""
        if data:
            self.is_writing = True
            await self.send({"type": "http.response.body", "body": data, "more_body": True})
            self.is_writing = False
        for step in self.steps:
            step.check()

    async def end(self, data: bytes = b"") -> None:
        """End a stream; ``data`` is the gateway's own."""
        await self.send({"type": "http.response.body", "body": data, "more_body": False})

    async def send_whole(self, status: int, headers: Pairs, body: bytes) -> None:
        """Send a whole answer. Raises `HttpError` if a step refuses it."""
        kind = dict(headers).get(b"content-type", b"").decode("latin-1") if self.steps else ""
        for step in self.steps:
            body = await step.document(status, kind, body)
        await self.begin(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

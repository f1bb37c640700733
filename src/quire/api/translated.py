"""Chats that come in another API's words — Anthropic's messages, OpenAI's responses — and errors that keep to these."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from quire.api.chat import ChatWork, chat_work
from quire.api.protocol import ChatRequest
from quire.api.state import ApiState
from quire.errors import RequestError

EFFORTS = {"max": "xhigh"}  # the highest that templates know


@dataclass(frozen=True, slots=True)
class Words:
    """What a chat completion's errors call a field → what the client called it. ``whole``: where that is all of it."""

    parts: Sequence[tuple[str, str]]
    whole: Sequence[tuple[str, str]] = ()

    @contextmanager
    def kept(self) -> Generator[None, None, None]:
        """Raise errors of the block with the client's names in them."""
        try:
            yield
        except RequestError as error:
            message, param = self._of(str(error)), error.param and self._of(error.param)
            for ours, theirs in self.whole:
                if param == ours:
                    message, param = message.replace(ours, theirs, 1), theirs
            raise type(error)(message, param=param, code=error.code) from None

    async def work(
        self, state: ApiState, request: ChatRequest, ignored: list[str] | None, *, effort: str | None = None
    ) -> ChatWork:
        """As `chat_work`; the client's names are in its errors, and in those that the engine may raise later."""
        with self.kept():
            work = await chat_work(state, request, ignored, effort=effort)
        form = work.sampling.structured_outputs
        if form is None:
            return work
        named = replace(form, param=self._of(form.param))
        return replace(work, sampling=replace(work.sampling, structured_outputs=named))

    def _of(self, text: str) -> str:
        for ours, theirs in self.parts:
            text = text.replace(ours, theirs)
        return text

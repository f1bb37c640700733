"""`Prompts`: text to token ids, and a conversation to both. What `Frontend` does before it has a `Request`.

A template that is not on the list of known ones (`quire.text.chat_template`) is compiled and rendered in a helper
process, so that one that never ends or fills the memory fails its own request and delays no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from quire.engine import helper_pool
from quire.engine.helper_pool import Answer, HelperPool
from quire.errors import ModelLoadError, RequestError
from quire.text.chat_template import ChatTemplate, over_limit
from quire.text.tokenizer import Tokenizer

# Longer texts are tokenized on a thread: shorter ones take at most about 2 ms of the event loop's time.
INLINE_CHARS = 8192


class RenderedChat(NamedTuple):
    """What a chat template makes of a conversation."""

    text: str
    token_ids: list[int]


class Prompts:
    """The tokenizer and the chat template of one model. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._helpers = HelperPool("template", self._sources)

    async def start(self) -> None:
        """Start a helper if the template needs one, so that the first request does not wait for it.

        Raises:
            ModelLoadError: the template does not compile.
        """
        if self.chat_template.is_known:
            return
        greeting = await asyncio.to_thread(self._helpers.greeting)
        if greeting is None:
            raise ModelLoadError("The chat template takes too much time or memory to compile.")
        if "error" in greeting:
            raise ModelLoadError(greeting["error"])

    def close(self) -> None:
        """End the helpers."""
        self._helpers.close()

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``; a long text is tokenized on a thread, so that streams keep flowing."""
        if len(text) <= INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_special_tokens: bool = False, **options: Any
    ) -> RenderedChat:
        """Return the prompt of a conversation; ``options`` as for `ChatTemplate.render`.

        Raises:
            RequestError: the template rejects the messages, fails on them, or needs too much time or memory.
            CapacityError: too many conversations wait for a helper (retryable).
        """
        if self.chat_template.is_known:
            text = self.chat_template.render(messages, **options)
        else:
            text = await asyncio.wrap_future(self._submit(messages, options))
        return RenderedChat(text, await self.tokenize(text, add_special_tokens=add_special_tokens))

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """As `chat`, but only the text, and blocking: for a thread other than the event loop's."""
        if self.chat_template.is_known:
            return self.chat_template.render(messages, **options)
        return self._submit(messages, options).result()

    def _sources(self) -> Answer:
        special = self.chat_template.special
        return {
            "templates": self.chat_template.sources,
            "roles": dict(special.roles),
            "additional": list(special.additional),
        }

    def _submit(self, messages: Sequence[Mapping[str, Any]], options: dict[str, Any]) -> Future[str]:
        now = self.chat_template.clock().isoformat()
        try:
            return self._helpers.submit({"messages": list(messages), "now": now, **options}, _text_of)
        except RecursionError:
            raise RequestError("messages or tools are nested too deeply.", param="messages") from None


def _text_of(answer: Answer | None, late: bool) -> str:
    if answer is None and late:
        raise over_limit(f"it takes longer than {helper_pool.TASK_LIMIT_S:g} s")
    if answer is None:
        raise over_limit("it takes more memory or stack than is allowed")
    if "error" in answer:
        raise RequestError(answer["error"], param=answer["param"], code=answer["code"])
    text: str = answer["text"]
    return text

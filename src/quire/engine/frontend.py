"""`Frontend`: the asyncio side of an engine. Prompts in, streams of text out. Torch-free.

One thread (the pump) waits in `EngineClient.receive` and hands each step's events to the event loop, where they become
text. Everything else happens in the loop's thread.

    submit ──> prepare_request ──> client.send(AddRequest)
    stream <── RequestOutputState <── _dispatch <── pump thread <── client.receive
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from quire.clock import Clock
from quire.engine.client import EngineClient, EngineInfo
from quire.engine.inbox import AbortRequest, AddRequest
from quire.engine.model_info import ModelInfo
from quire.engine.output import RequestOutputState
from quire.engine.prepare import SEED_BITS, prepare_request
from quire.engine.stream import RequestStream
from quire.errors import CapacityError, EngineDeadError, QuireError, RequestError
from quire.metrics.engine_stats import EngineStats
from quire.metrics.log import Log
from quire.request import FinishReason, SamplingParams, TokenEvent
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

# Longer texts are tokenized on a thread: about 2 ms of the loop's time at most for those below.
INLINE_CHARS = 8192
FrontendState = Literal["starting", "ready", "draining", "dead"]
log = Log("frontend")


class Frontend:
    """Submits requests to an engine and turns its events into streams. Belongs to one event loop."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        model: ModelInfo,
        clock: Clock,
        *,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS),
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.model = model
        self.state: FrontendState = "starting"
        self.info: EngineInfo | None = None  # set when ready
        self.failure: QuireError | None = None  # why the state is "dead"
        self._client = client
        self._clock = clock
        self._draw_seed = draw_seed
        self._open: dict[str, tuple[RequestOutputState, RequestStream]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._closing = False

    async def start(self) -> EngineInfo:
        """Wait until the engine is loaded and return what it says of itself.

        Raises:
            ModelLoadError, ConfigError, EngineDeadError: it could not start; one line.
        """
        raise NotImplementedError

    async def submit(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
    ) -> RequestStream:
        """Start a request. A string is tokenized with what the model expects around a text (BOS).

        A refusal by the engine (queue full, can never fit) is the first chunk of the stream, with `FinishReason.ERROR`.

        Raises:
            RequestError: names the field (`prompt`, `max_tokens`, `logit_bias` …).
            CapacityError: the server is starting or draining (retryable: 503).
            EngineDeadError: the engine is gone (503).
        """
        raise NotImplementedError

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[int]:
        """Return the prompt ids of a chat. The template writes BOS itself; none is added to it.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        raise NotImplementedError

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``; a long text is tokenized on a thread, so that streams keep flowing."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        """Return the engine's latest numbers."""
        return self._client.stats()

    @property
    def num_requests(self) -> int:
        """Requests in flight, waiting ones included."""
        return len(self._open)

    async def drain(self, grace_s: float) -> None:
        """Take no new requests; let the running ones finish for ``grace_s`` seconds, then abort them."""
        raise NotImplementedError

    async def close(self) -> None:
        """Abort what is in flight (each sample gets its terminal chunk) and stop the engine."""
        raise NotImplementedError

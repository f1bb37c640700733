"""`Frontend`: the asyncio side of an engine. Prompts in, streams of text out. Torch-free.

A request's way down and up:

    prompts      messages ──> text ──> token ids
    submit       prompt ──> `prepare_request` ──> Request ──> client.send
    stream       text <── `RequestOutputState` <── `OpenStreams` <── `EventPump` <── client.receive

A template that is not on the list of known ones (`quire.text.chat_template`) is compiled and rendered in a helper
process, so that one that never ends or fills the memory fails its own request and delays no other.

The pump is a thread: it waits in `EngineClient.receive` and hands the events of each step to the event loop. Everything
else happens in the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from quire.clock import Clock
from quire.engine.adapters import AdapterRegistry
from quire.engine.client import Calls, EngineClient, EngineInfo
from quire.engine.continued import continued
from quire.engine.messages import CoreCall, Reply
from quire.engine.output import RequestOutputState
from quire.engine.prompts import NOT_BEGUN, Begun, ModelInfo, prepare_request, prompts_of
from quire.engine.stream import OpenStreams, RequestStream
from quire.errors import CapacityError, EngineDeadError, QuireError
from quire.metrics.engine_stats import EngineStats
from quire.metrics.log import Log
from quire.request import NO_TERMS, SEED_BITS, Adapter, Pooling, Request, SamplingParams, Terms, TokenEvent
from quire.structured_outputs import StructuredOutputsParams
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.engine.grammar_checker import GrammarChecker

FrontendState = Literal["starting", "ready", "draining", "dead"]
log = Log("frontend")


class Frontend:
    """Submits requests to an engine and turns its events into streams. Belongs to one event loop."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        model: ModelInfo,
        clock: Clock,
        *,
        adapters: AdapterRegistry | None = None,
        new_seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS),
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.model = model
        self.adapters = adapters  # None: adapters cannot be loaded at run time either
        self.state: FrontendState = "starting"
        self.info: EngineInfo | None = None  # set when ready
        self.failure: QuireError | None = None  # why the state is "dead"
        self._client = client
        self.health = client.health  # the engine's state
        self._clock = clock
        self._new_seed = new_seed
        self.prompts = prompts_of(model, tokenizer, chat_template)
        self._grammars: GrammarChecker | None = None  # with the first form
        self.streams = OpenStreams(client.send)
        self._calls = Calls(client.send)
        self._closing = False  # the process is about to end: admission stays closed
        self._num_submitted = 0
        self._pump: EventPump | None = None
        self._ready: asyncio.Future[EngineInfo] | None = None

    async def start(self) -> EngineInfo:
        """Wait until the engine is loaded and return what it reports.

        Raises:
            ModelLoadError, ConfigError, EngineDeadError: the engine could not start; one line.
        """
        assert self._pump is None, "start once"
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._pump = EventPump(
            self._client,
            loop,
            on_ready=self._on_ready,
            on_events=self.streams.dispatch,
            on_replies=self._calls.answered,
            on_death=self._die,
        )
        self._pump.start()
        await self.prompts.start()
        return await self._ready

    def prepare_grammars(self) -> None:
        """Start the helper for grammars on a thread, while no request is in flight: the first form does not wait."""
        self._checker.prepare(lambda: self.num_requests == 0)

    @property
    def _checker(self) -> GrammarChecker:
        if self._grammars is None:
            checkers = import_module("quire.engine.grammar_checker")
            model = self.model
            self._grammars = checkers.GrammarChecker(self.tokenizer, model.vocab_size, model.eos_token_ids)
        return self._grammars

    async def check_form(self, form: StructuredOutputsParams) -> str:
        """Return the grammar of a form, compiled in a helper and remembered, or raise what is wrong with it."""
        return await asyncio.wrap_future(self._checker.submit(form))

    async def submit(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        terms: Terms = NO_TERMS,
        request_id: str | None = None,
        continues: bool = False,
        adapter: Adapter | None = None,
        pooling: Pooling | None = None,
        begun: Begun = NOT_BEGUN,
    ) -> RequestStream:
        """Start a request. A string is tokenized with what the model expects around a text (BOS).

        ``pooling``: nothing is generated; the only chunk carries what is pooled from the prompt. ``continues``: the
        output continues the prompt's text, as a completion does; an answer to a chat begins a new text.

        ``begun``: of an answer that goes on behind what was sent of it.
        A request that the engine rejects (queue full, can never fit) ends with its first chunk: `FinishReason.ERROR`.

        Raises:
            RequestError: names the field (`prompt`, `max_tokens`, `logit_bias` …).
            CapacityError: the server is starting or draining (retryable: 503).
            EngineDeadError: the engine is gone (503).
        """
        self._check_open()
        arrival_s = self._clock.now() - begun.elapsed_s
        name = request_id or f"req-{secrets.token_hex(8)}"
        self._num_submitted += 1
        form = sampling.structured_outputs
        grammar: str | None = None
        if form is not None:
            grammar = await self.check_form(form)
        request = prepare_request(
            # Unique even if a client repeats a name while late events of the earlier request are on their way.
            f"{name}/{self._num_submitted}",
            await self.prompts.tokenize(prompt, most_tokens=self.model.max_model_len)
            if isinstance(prompt, str)
            else prompt,
            sampling,
            self.model,
            self.tokenizer,
            arrival_s=arrival_s,
            seed=self._new_seed() if begun.seed is None else begun.seed,
            terms=terms,
            grammar=grammar,
            adapter=adapter,
            pooling=pooling,
        )
        self._check_open()  # tokenizing and checking the grammar may have taken a while
        return self._open(name, request, begun.delivered, continues=continues)

    def _open(
        self, name: str, request: Request, delivered: Sequence[TokenEvent], *, continues: bool
    ) -> RequestStream:
        """Send a request to the engine, and return the stream of what comes."""
        if delivered:
            request = continued(request, delivered, self.model.vocab_size)
        state = RequestOutputState(request, self.tokenizer, self._client.send, continues=continues)
        stream = RequestStream(name, state, lambda: self.streams.abandon(request.request_id))
        stream.delivered = [chunk for event in delivered if (chunk := state.feed(event)) is not None]
        if state.finished:
            return stream
        self._client.send(request)  # may fail, so the stream is open only after it
        self.streams.add(request.request_id, stream, self._clock.now())
        return stream

    def stats(self) -> EngineStats:
        """Return the engine's latest statistics."""
        return self._client.stats()

    @property
    def num_requests(self) -> int:
        """Number of requests in flight, including those that wait in the queue."""
        return len(self.streams)

    async def call(self, make: Callable[[str], CoreCall]) -> Reply:
        """Call the core, which replies between two steps; ``make`` builds the message with a call id.

        Raises:
            ConfigError: the core rejected the call, and nothing has changed; `param` names the setting.
            CapacityError, EngineDeadError: no engine can reply now, or ever again (503).
        """
        if self.state == "dead" or self.info is None:
            self._check_open()
        return await self._calls.ask(make)

    def stop_admitting(self) -> None:
        """Reject new requests (503) while those in flight finish."""
        if self.state in ("starting", "ready"):
            self.state = "draining"

    def admit_again(self) -> bool:
        """Undo `stop_admitting`; return False if the process is about to end or the engine is dead."""
        if self.state == "draining" and not self._closing:
            self.state = "starting" if self.info is None else "ready"
        return self.state in ("starting", "ready")

    async def drain(self, grace_s: float) -> None:
        """Reject new requests, let running ones finish for ``grace_s`` seconds, then abort the rest.

        Each sample that is still open then gets its terminal chunk, with `FinishReason.ABORT`.
        """
        self._closing = True
        self.stop_admitting()
        await self.streams.end(grace_s)

    async def close(self) -> None:
        """Abort what is in flight and stop the engine. A second call has no effect."""
        await self.drain(0.0)
        if self._grammars is not None:
            self._grammars.close()
        self.prompts.close()
        if self._pump is None:
            await asyncio.to_thread(self._client.close)
        else:
            await self._pump.stop()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineDeadError("The engine was closed while it was loading."))

    def _check_open(self) -> None:
        if self.state == "dead":
            raise EngineDeadError(str(self.failure))
        if self.state != "ready":
            doing = (
                "still loading the model" if self.state == "starting"
                else "shutting down" if self._closing
                else "draining: it finishes what runs and takes nothing new"
            )  # fmt: skip
            raise CapacityError(f"The server is {doing}: try again later.", retryable=True)

    def _on_ready(self, info: EngineInfo) -> None:
        self.info = info
        if self.state == "starting":
            self.state = "ready"
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_result(info)

    def _die(self, error: QuireError) -> None:
        self.state = "dead"
        self.failure = error
        log.error("engine_dead", error=error)
        self.streams.fail(str(error))
        self._calls.fail(error)
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_exception(error)


@dataclass(eq=False)
class EventPump:
    """A thread that receives from the engine and calls back in the event loop's thread.

    ``on_ready`` is called once, ``on_events`` for each step that has events, ``on_replies`` when calls were answered,
    and ``on_death`` at most once, but not after `stop`.
    """

    client: EngineClient
    loop: asyncio.AbstractEventLoop
    on_ready: Callable[[EngineInfo], None]
    on_events: Callable[[list[TokenEvent]], None]
    on_replies: Callable[[list[Reply]], None]
    on_death: Callable[[QuireError], None]

    def __post_init__(self) -> None:
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="quire-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Close the client, which wakes the thread, and wait for the thread to end."""
        self._stopping = True
        await asyncio.to_thread(self.client.close)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._post(self.on_ready, self.client.wait_ready())
            while not self._stopping:
                events = self.client.receive()
                if events:
                    self._post(self.on_events, events)
                if replies := self.client.replies():
                    self._post(self.on_replies, replies)
        except QuireError as error:
            self._die(error)
        except Exception as error:  # a bug, but the streams have to end
            log.exception("pump_failed")
            self._die(EngineDeadError(f"{type(error).__name__}: {error}"))

    def _die(self, error: QuireError) -> None:
        if not self._stopping:
            self._post(self.on_death, error)

    def _post(self, call: Callable[..., None], argument: object) -> None:
        # If the loop was closed meanwhile, there is nothing left to call.
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call, argument)

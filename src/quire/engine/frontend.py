"""`Frontend`: the asyncio side of an engine. Prompts in, streams of text out. Torch-free.

A request's way down and up:

    chat_prompt  messages ──> text ──> token ids                (`Prompts`)
    submit       prompt ──> `prepare_request` ──> Request ──> client.send(AddRequest)
    stream       text <── `RequestOutputState` <── `OpenStreams` <── `EventPump` <── client.receive

A template that is not on the list of known ones (`quire.text.chat_template`) is compiled and rendered in a helper
process, so that one that never ends or fills the memory fails its own request and delays no other.

The pump is a thread: it waits in `EngineClient.receive` and hands the events of each step to the event loop. Everything
else happens in the loop's thread.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal, NamedTuple

from quire.clock import Clock
from quire.engine import helper_pool
from quire.engine.adapters import AdapterRegistry
from quire.engine.build import EngineInfo
from quire.engine.client import EngineClient
from quire.engine.core import AddRequest, Call, Reply
from quire.engine.helper_pool import GrammarChecker, Head, HelperPool
from quire.engine.large_input import INLINE_CHARS, LargeBodies, LongTexts, off_loop
from quire.engine.output import RequestOutputState
from quire.engine.prepare import SEED_BITS, ModelInfo, prepare_request, too_long
from quire.engine.stream import Calls, EventPump, OpenStreams, RequestStream
from quire.errors import CapacityError, EngineDeadError, ModelLoadError, QuireError, RequestError
from quire.http.limits import TEXT_CHARACTERS, too_many
from quire.metrics.engine_stats import EngineStats
from quire.metrics.log import Log
from quire.request import Adapter, Deadline, Pooling, SamplingParams
from quire.text.chat_template import ChatTemplate, over_limit
from quire.text.tokenizer import Tokenizer

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
        self._clock = clock
        self._new_seed = new_seed
        self.prompts = Prompts(tokenizer, chat_template)
        self._grammars = GrammarChecker(tokenizer, model.vocab_size, model.eos_token_ids)
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

    async def submit(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        continues: bool = False,
        adapter: Adapter | None = None,
        pooling: Pooling | None = None,
        deadline: Deadline | None = None,
    ) -> RequestStream:
        """Start a request. A string is tokenized with what the model expects around a text (BOS).

        ``pooling``: nothing is generated; the only chunk carries what is pooled from the prompt. ``continues``: the
        output continues the prompt's text, as a completion does; an answer to a chat begins a new text.

        A request that the engine rejects (queue full, can never fit) ends with its first chunk: `FinishReason.ERROR`.

        Raises:
            RequestError: names the field (`prompt`, `max_tokens`, `logit_bias` …).
            CapacityError: the server is starting or draining (retryable: 503).
            EngineDeadError: the engine is gone (503).
        """
        self._check_open()
        arrival_s = self._clock.now()
        name = request_id or f"req-{secrets.token_hex(8)}"
        self._num_submitted += 1
        form = sampling.structured_outputs
        grammar: str | None = None
        if form is not None:
            grammar = await asyncio.wrap_future(self._grammars.submit(form))
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
            seed=self._new_seed(),
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            grammar=grammar,
            adapter=adapter,
            pooling=pooling,
            deadline=deadline,
        )
        self._check_open()  # tokenizing and checking the grammar may have taken a while
        state = RequestOutputState(request, self.tokenizer, self._client.send, continues=continues)
        stream = RequestStream(name, state, lambda: self.streams.abandon(request.request_id))
        self._client.send(AddRequest(request))  # may fail, so the stream is open only after it
        self.streams.add(request.request_id, stream)
        return stream

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        most_tokens: int | None = None,
        **variables: Any,
    ) -> RenderedChat:
        """Return text and token ids of a conversation. The template writes BOS itself, so tokenizing adds none.

        ``add_generation_prompt`` None: begin an answer, unless the final message is continued. ``variables`` are
        further variables for the template (`enable_thinking` …). ``most_tokens``: reject a text that is certain
        to have more, before it is tokenized.

        Raises:
            RequestError: the model has no chat template, or the template rejects the messages or fails on them.
            CapacityError: too many conversations wait for a helper process (retryable: 503).
        """
        return await self.prompts.chat(
            messages,
            add_special_tokens=add_special_tokens,
            most_tokens=most_tokens,
            tools=tools,
            documents=documents,
            add_generation_prompt=(
                not continue_final_message if add_generation_prompt is None else add_generation_prompt
            ),
            continue_final_message=continue_final_message,
            variables=variables,
        )

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Return the ids of ``text``, as `Prompts.tokenize`; the context of the model does not bound it."""
        return await self.prompts.tokenize(text, add_special_tokens=add_special_tokens)

    def stats(self) -> EngineStats:
        """Return the engine's latest statistics."""
        return self._client.stats()

    @property
    def num_requests(self) -> int:
        """Number of requests in flight, including those that wait in the queue."""
        return len(self.streams)

    async def call(self, make: Callable[[str], Call]) -> Reply:
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


class RenderedChat(NamedTuple):
    """What a chat template makes of a conversation."""

    text: str
    token_ids: Sequence[int]


class Prompts:
    """The tokenizer and the chat template of one model. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._helpers = HelperPool("template", self._sources)
        self._texts = LongTexts(tokenizer)
        self.bodies = LargeBodies()

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
        self._texts.close()
        self.bodies.close()

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, most_tokens: int | None = None
    ) -> Sequence[int]:
        """Return the ids of ``text``. ``most_tokens``: reject a text that is certain to have more, at once.

        Raises:
            RequestError: the text is too long, or not Unicode.
            CapacityError: too many long texts wait (retryable).
        """
        if len(text) <= INLINE_CHARS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        least = self.tokenizer.min_tokens(len(text))
        if most_tokens is not None and least > most_tokens:
            raise too_long(f"at least {least}", most_tokens)
        if least == 0 and len(text) > TEXT_CHARACTERS:
            raise too_many("A text of the prompt", len(text), TEXT_CHARACTERS, "characters", "prompt")
        return await self._texts.encode(text, add_special_tokens=add_special_tokens)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool = False,
        most_tokens: int | None = None,
        **options: Any,
    ) -> RenderedChat:
        """Return the prompt of a conversation; ``options`` as for `ChatTemplate.render`, the rest as for `tokenize`.

        Raises:
            RequestError: the template rejects the messages, fails on them, or needs too much time or memory.
            CapacityError: too many conversations wait for a helper (retryable).
        """
        if not self.chat_template.is_known:
            text = await asyncio.wrap_future(self._submit(messages, options))
        else:
            text = await off_loop(len(messages), partial(self.chat_template.render, messages, **options))
        ids = await self.tokenize(text, add_special_tokens=add_special_tokens, most_tokens=most_tokens)
        return RenderedChat(text, ids)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """As `chat`, but only the text, and blocking: for a thread other than the event loop's."""
        if self.chat_template.is_known:
            return self.chat_template.render(messages, **options)
        return self._submit(messages, options).result()

    def _sources(self) -> Head:
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


def _text_of(answer: Head | None, late: bool) -> str:
    if answer is None and late:
        raise over_limit(f"it takes longer than {helper_pool.TASK_LIMIT_S:g} s")
    if answer is None:
        raise over_limit("it takes more memory or stack than is allowed")
    if "error" in answer:
        raise RequestError(answer["error"], param=answer["param"], code=answer["code"])
    text: str = answer["text"]
    return text

"""`OfflineEngine`: a model loaded in this process, and how requests run through it; `LLM` has its tasks."""

from __future__ import annotations

import atexit
import random
import tomllib
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.resources import files
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from tqdm import tqdm

from quire.args import executor_of
from quire.clock import WallClock
from quire.device import detect_device
from quire.engine.assemble import configure, llm_args, load_text
from quire.engine.in_process import InProcessClient
from quire.engine.messages import AbortRequest, ResetPrefixCache
from quire.engine.output import OutputChunk, RequestOutputState, merge
from quire.engine.prompts import RenderedChat, prepare_request
from quire.engine.results import RequestOutput, request_output
from quire.errors import ConfigError
from quire.request import SEED_BITS, Adapter, Pooling, Request, SamplingParams

if TYPE_CHECKING:
    from quire.engine.grammar_checker import GrammarChecker
    from quire.engine.images import ImageFile, ImageReader


class Metric(NamedTuple):
    """A figure of the engine, under the name that ``/metrics`` of a server has for it."""

    name: str
    value: float
    kind: str  # "gauge" | "counter"


class OfflineEngine:
    """One engine, its tokenizer and its chat template."""

    def __init__(self, model: str, settings: Mapping[str, Any]) -> None:
        """Load ``model``; arguments and errors as of `LLM`."""
        args = llm_args(model, settings)
        config, checkpoint = configure(args, detect_device(args.device))
        text = load_text(args, config, checkpoint)
        self.model = text.model
        self.adapters = text.adapters
        self._tokenizer = text.tokenizer
        self._chat_template = text.chat_template
        self._chat_template.compile()  # rendered in this process, which is the caller's own
        self._clock = WallClock()
        self._seeds = random.Random(args.seed)
        self._grammars: GrammarChecker | None = None  # with the first form
        self._images: ImageReader | None = None  # with the first conversation of a model that sees
        self._parts_only = False  # see `quire.engine.images.needs_parts`
        self._num_requests = 0
        # The scheduler's queue, which protects servers, would reject more.
        self._max_in_flight = max(1, args.max_queue)
        self._config = config
        self._executor = executor_of(args)
        self._client: InProcessClient | None = None
        self.wake_up()
        # A thread that is inside native code when the interpreter ends would end the process by std::terminate.
        this = weakref.ref(self)
        self._at_exit = lambda: None if (engine := this()) is None else engine.close()
        atexit.register(self._at_exit)

    @property
    def client(self) -> InProcessClient:
        """The engine. Raises `ConfigError` while the model sleeps."""
        if self._client is None:
            raise ConfigError("LLM: the model sleeps; call wake_up() first")
        return self._client

    def sleep(self, level: int = 1) -> None:
        """Free the weights and the KV cache until `wake_up`, which reads the weights from the disk again.

        ``level`` is 1 or 2, as in vLLM; both do the same here.
        """
        if level not in (1, 2):
            raise ConfigError(f"LLM.sleep: level = {level!r} must be 1 or 2")
        if self._client is not None:
            self._client.close()
            self._client = None

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Load the model after `sleep`. ``tags`` of vLLM name parts to load; here the model is loaded as a whole."""
        if self._client is None:
            self._client = InProcessClient(self._config, self._clock, executor=self._executor)
            self.info = self._client.wait_ready()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; always True."""
        self.client.send(ResetPrefixCache("reset"))
        while not self.client.replies():
            self.client.receive()
        return True

    def get_metrics(self) -> list[Metric]:
        """Return the engine's figures."""
        table = tomllib.loads((files("quire.metrics") / "metrics.toml").read_text())
        stats = self.client.stats()
        return [
            Metric(name, float(getattr(stats, attribute)), kind)
            for kind in ("gauge", "counter")
            for name, (_, attribute) in table[f"engine_{kind}s"].items()
        ]

    def close(self) -> None:
        """Free the engine; the object cannot be used afterwards. One that is open at the program's end is closed."""
        atexit.unregister(self._at_exit)
        self.sleep()
        if self._grammars is not None:
            self._grammars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _without_images(self, chats: Sequence[Any]) -> tuple[list[Any], list[list[ImageFile]]]:
        """Return conversations as a chat template reads them, and the images of each."""
        if self.model.vision is None:
            return list(chats), [[] for _ in chats]
        if self._images is None:
            images = import_module("quire.engine.images")
            self._images = images.reader_of(self.model.vision, self._tokenizer, in_process=True)
            self._parts_only = images.needs_parts(self._chat_template.render)
        read = import_module("quire.engine.image_parts").with_images_read
        taken = [self._images.take(read(chat), parts_only=self._parts_only) for chat in chats]
        return [chat for chat, _ in taken], [files for _, files in taken]

    def _chat_ids(self, text: str, files: Sequence[ImageFile]) -> Sequence[int]:
        """Return the ids of a conversation's text, with its images in their places."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return ids if self._images is None else self._images.place_now(RenderedChat(text, ids), files)

    def _request(
        self,
        ids: Sequence[int],
        sampling: SamplingParams,
        adapter: Adapter | None = None,
        pooling: Pooling | None = None,
    ) -> Request:
        request_id = str(self._num_requests)
        self._num_requests += 1
        form, grammar = sampling.structured_outputs, None
        if form is not None:
            if self._grammars is None:
                self._grammars = import_module("quire.engine.grammar_checker").GrammarChecker(
                    self._tokenizer, self.model.vocab_size, self.model.eos_token_ids
                )
            grammar = self._grammars.check(form)
        return prepare_request(
            request_id,
            ids,
            sampling,
            self.model,
            self._tokenizer,
            arrival_s=self._clock.now(),
            seed=self._seeds.getrandbits(SEED_BITS),
            grammar=grammar,
            adapter=adapter,
            pooling=pooling,
        )

    def _run(
        self, requests: Sequence[Request], texts: Sequence[str | None], show: bool, *, continues: bool
    ) -> list[RequestOutput]:
        received: dict[str, list[list[OutputChunk]]] = {
            r.request_id: [[] for _ in range(r.sampling.num_samples)] for r in requests
        }
        states: dict[str, RequestOutputState] = {}
        num_tokens, start_s = 0, self._clock.now()
        # None: shown where stderr is a terminal
        with tqdm(total=len(requests), unit=" requests", disable=None if show else True) as bar:
            for state, chunk in self._chunks(deque(requests), continues=continues):
                states[state.request.request_id] = state
                received[state.request.request_id][chunk.index].append(chunk)
                num_tokens += len(chunk.token_ids)
                if state.finished:
                    rate = num_tokens / max(1e-9, self._clock.now() - start_s)
                    bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                    bar.update()
        return [
            request_output(
                states[r.request_id], text, [merge(c) for c in received[r.request_id]], self._tokenizer
            )
            for r, text in zip(requests, texts, strict=True)
        ]

    def _chunks(
        self, waiting: deque[Request], *, continues: bool
    ) -> Iterator[tuple[RequestOutputState, OutputChunk]]:
        """Run all requests to their ends. If the caller leaves early, the rest are aborted."""
        client, running = self.client, dict[str, RequestOutputState]()
        try:
            while waiting or running:
                while waiting and len(running) < self._max_in_flight:
                    request = waiting.popleft()
                    client.send(request)
                    running[request.request_id] = RequestOutputState(
                        request, self._tokenizer, client.send, continues=continues
                    )
                for event in client.receive():
                    state = running.get(event.request_id)
                    chunk = None if state is None else state.feed(event)
                    if state is not None and chunk is not None:
                        if state.finished:
                            del running[event.request_id]
                        yield state, chunk
        finally:
            for request_id in running:
                client.send(AbortRequest(request_id))

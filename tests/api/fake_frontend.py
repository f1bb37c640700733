"""A frontend without an engine: real tokenizing, checking and text output, tokens from a script."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tests.fakes.executor import FakeExecutor
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.clock import VirtualClock
from quire.config import CacheConfig, SchedulerConfig
from quire.engine.adapters import AdapterRegistry
from quire.engine.client import EngineHealth, EngineInfo
from quire.engine.core import EngineCore
from quire.engine.messages import CoreCall, Reply
from quire.engine.output import RequestOutputState
from quire.engine.prompts import NOT_BEGUN, Begun, ModelInfo, RenderedChat, prepare_request
from quire.engine.stream import RequestStream
from quire.errors import CapacityError, ConfigError, QuireError, RequestError
from quire.metrics.engine_stats import EngineStats
from quire.request import (
    NO_TERMS,
    Adapter,
    FinishReason,
    Pooling,
    SampleTiming,
    SamplingParams,
    Terms,
    TokenEvent,
    TokenLogprobs,
)
from quire.scheduler.scheduler import Scheduler
from quire.structured_outputs import StructuredOutputsParams
from quire.text.chat_template import ChatTemplate
from quire.text.grammar import grammar_source
from quire.text.token_text import BYTE_OF_CHAR, make_token_text
from quire.text.tokenizer import SpecialTokens, Tokenizer

END = 256
ANSWER = "Hello, wörld! 🙂 bye"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% endfor %}{# reasoning_effort #}"
INFO = EngineInfo(4096, 1, 1, "fake", "exact", 0.0, 0)
# (prompt ids, sample index, seed) → token ids of that sample
Script = Callable[[Sequence[int], int, int], Sequence[int]]


def byte_tokenizer(*, thinks: bool = False) -> Tokenizer:
    """256 byte tokens, then <|end|>, then, with ``thinks``, <think> and </think>."""
    vocab = dict(BYTE_OF_CHAR)
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    if thinks:
        backend.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return Tokenizer(backend, make_token_text(backend), SpecialTokens({"eos_token": "<|end|>"}))


def say(text: str) -> list[int]:
    return [*text.encode(), END]


def default_script(prompt: Sequence[int], index: int, seed: int) -> Sequence[int]:
    return say(ANSWER if index == 0 else f"{ANSWER} {index}")


@dataclass
class Submitted:
    """What `submit` was called with."""

    prompt: str | Sequence[int]
    sampling: SamplingParams
    kwargs: dict[str, Any]
    stream: RequestStream
    aborted: bool = False


class FakeFrontend:
    """Same shape as `quire.engine.frontend.Frontend`. ``gate`` (if set) holds every token after the first back."""

    def __init__(
        self,
        script: Script = default_script,
        *,
        max_model_len: int = 256,
        step_s: float = 0.0,
        thinks: bool = False,
        template: str = TEMPLATE,
    ) -> None:
        self.tokenizer = byte_tokenizer(thinks=thinks)
        self.chat_template = ChatTemplate({"default": template}, self.tokenizer.special, datetime.now)
        self.chat_template.is_known = True  # rendered without a helper process
        self.prompts = self  # `chat`, `render` and `tokenize` of `Prompts`
        self.model = ModelInfo(
            names=("tiny", "alias"),
            max_model_len=max_model_len,
            vocab_size=259 if thinks else 257,
            eos_token_ids=(END,),
            generation_defaults={"temperature": 0.5},
        )
        self.state = "ready"
        self.engine_health = EngineHealth()
        self.adapters: AdapterRegistry | None = None
        self.info: EngineInfo | None = INFO
        self.submitted: list[Submitted] = []
        self.rendered: list[tuple[list[Mapping[str, Any]], dict[str, Any]]] = []
        self.rendered_tools: list[Any] = []
        self.refusal: tuple[str, str] | None = None  # (error, error_kind) as the first event
        self.fail_at: int | None = None  # token number at which the engine fails the sequence
        self.raises: Exception | None = None
        self.gate: asyncio.Event | None = None
        cache = CacheConfig(16)
        self._core = EngineCore(Scheduler(SchedulerConfig(), cache), FakeExecutor(cache), VirtualClock())
        self._script = script
        self._step_s = step_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._ids = itertools.count()

    async def start(self) -> EngineInfo:
        return INFO

    async def check_form(self, form: StructuredOutputsParams) -> str:
        return grammar_source(form)

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
        assert not begun.delivered, "a fake goes on with nothing"
        if self.raises is not None:
            raise self.raises
        if self.state != "ready":
            raise CapacityError(f"The server is {self.state}.", retryable=True)
        form = sampling.structured_outputs
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        request = prepare_request(
            request_id or f"r{next(self._ids)}",
            ids,
            sampling,
            self.model,
            self.tokenizer,
            arrival_s=0.0,
            seed=7 if begun.seed is None else begun.seed,
            terms=terms,
            adapter=adapter,
            grammar=None if form is None else grammar_source(form),
            pooling=pooling,
        )
        output = RequestOutputState(request, self.tokenizer, lambda message: None, continues=continues)
        stream = RequestStream(request.request_id, output, lambda: self._give_up(record))
        kwargs = {
            "request_id": request_id,
            "priority": terms.priority,
            "cache_salt": terms.cache_salt,
            "tenant": terms.tenant.name,
        }
        if terms.tenant.weight != 1.0:
            kwargs["tenant_weight"] = terms.tenant.weight
        record = Submitted(prompt, sampling, kwargs, stream)
        self.submitted.append(record)
        task = asyncio.create_task(self._run(output, stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        *,
        add_special_tokens: bool = False,
        most_tokens: int | None = None,
        **kwargs: Any,
    ) -> RenderedChat:
        self.rendered.append((list(messages), kwargs))
        self.rendered_tools.append(tools)
        if any(m["role"] == "tool" and not m.get("tool_call_id") for m in messages):
            raise RequestError("The chat template refuses these messages.", param="messages")
        text = self.chat_template.render(messages)
        return RenderedChat(text, await self.tokenize(text, add_special_tokens=add_special_tokens))

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        return self.chat_template.render(messages, **options)

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, most_tokens: int | None = None
    ) -> list[int]:
        return [END] * add_special_tokens + self.tokenizer.encode(text)

    def health(self) -> EngineHealth:
        return self.engine_health

    def stats(self) -> EngineStats:
        return EngineStats(num_running=self.num_requests, num_blocks=100, num_free_blocks=75)

    @property
    def num_requests(self) -> int:
        return sum(not s.stream.output.finished for s in self.submitted)

    async def call(self, make: Callable[[str], CoreCall]) -> Reply:
        """The core's answers, from a scheduler with nothing in it."""
        self._core.put(make("call"))
        self._core.step()
        (reply,) = self._core.replies
        self._core.replies = []
        if reply.error is not None:
            raise ConfigError(reply.error, param=reply.param)
        return reply

    def stop_admitting(self) -> None:
        self.state = "draining"

    def admit_again(self) -> bool:
        self.state = "ready"
        return True

    async def drain(self, grace_s: float) -> None:
        self.state = "draining"
        deadline = asyncio.get_running_loop().time() + grace_s
        while self.num_requests and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for submitted in self.submitted:
            await submitted.stream.abort()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def pooled(self, prompt: Sequence[int], pooling: Pooling) -> tuple[float, ...]:
        """Six numbers that depend on the prompt and the kind; for "logprobs" one for each id, for "classify" one."""
        if pooling.kind == "logprobs":
            return tuple(-1.0 - (sum(prompt) + token_id) % 7 for token_id in pooling.token_ids)
        if pooling.kind in ("classify", "logits"):
            return ((sum(prompt) % 7 + pooling.second_from) / (10 if pooling.kind == "classify" else 3),)
        if pooling.kind == "tokens":
            return tuple(float(token_id * i) for token_id in prompt for i in range(3))
        if pooling.kind == "sparse":
            return (*(float(i) for i in range(len(prompt))), *(token_id / 4 for token_id in prompt))
        return tuple(float((sum(prompt) + i) % 5 + 1 + (pooling.kind == "mean")) for i in range(6))

    def _give_up(self, record: Submitted) -> None:
        record.aborted = True

    async def _run(self, output: RequestOutputState, stream: RequestStream) -> None:
        request, n = output.request, output.request.sampling.num_samples
        if self.refusal is not None:
            error, kind = self.refusal
            stream.fail(error, kind)
            return
        name = request.request_id
        if request.sampling.prompt_logprobs is not None:  # as two chunks of a prompt would give them
            entries = tuple(
                _scored(i, request.sampling.prompt_logprobs) for i in request.prompt_token_ids[1:]
            )
            for start, part in ((1, entries[:2]), (3, entries[2:])):
                stream.feed(TokenEvent(name, 0, prompt_logprobs=part, prompt_start=start))
        if request.prompt_only:
            await asyncio.sleep(self._step_s)
            for index in range(n):
                reason = FinishReason.LENGTH if request.pooling is None else FinishReason.STOP
                pooled = (
                    None
                    if request.pooling is None
                    else self.pooled(request.prompt_token_ids, request.pooling)
                )
                stream.feed(TokenEvent(name, index, finish_reason=reason, pooled=pooled))
            return
        assert request.sampling.seed is not None
        scripts = [list(self._script(request.prompt_token_ids, i, request.sampling.seed)) for i in range(n)]
        if END not in request.sampling.eos_token_ids:  # ignore_eos: a model goes on
            for ids in scripts:
                ids += [END] * (request.sampling.max_tokens - len(ids))
        for position in range(max(map(len, scripts))):
            await asyncio.sleep(self._step_s if position > 0 else 0.0)
            if position > 0 and self.gate is not None:
                await self.gate.wait()
            for index, ids in enumerate(scripts):
                if position < len(ids) and not output.finished:
                    stream.feed(self._event(output, index, ids, position))

    def _event(self, output: RequestOutputState, index: int, ids: Sequence[int], position: int) -> TokenEvent:
        sampling, token_id = output.request.sampling, ids[position]
        if position == self.fail_at:
            return TokenEvent(
                output.request.request_id,
                index,
                finish_reason=FinishReason.ERROR,
                error="boom",
                error_kind="step",
            )
        reason = None
        if token_id in sampling.eos_token_ids:
            reason = FinishReason.STOP
        elif position + 1 == sampling.max_tokens:
            reason = FinishReason.LENGTH
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = (_scored(token_id, sampling.logprobs),)
        return TokenEvent(
            output.request.request_id,
            index,
            (token_id,),
            logprobs,
            reason,
            END if reason is FinishReason.STOP else None,
            timing=SampleTiming(num_cached_tokens=3, queued_s=0.25) if position == 0 or reason else None,
        )


def _scored(token_id: int, count: int) -> TokenLogprobs:
    top = tuple((token_id + j) % 257 for j in range(count))
    return TokenLogprobs(token_id, -0.25, 1, top, tuple(-0.25 - 1.0 * j for j in range(count)))


class FailingFrontend(FakeFrontend):
    """A frontend whose engine cannot start."""

    async def start(self) -> EngineInfo:
        raise QuireError("no model here")

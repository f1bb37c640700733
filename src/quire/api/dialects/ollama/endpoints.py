"""Ollama's API: jobs of chats, texts and embeddings, and their answers as one object or as lines of JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from typing import Any

import msgspec

from quire.api.assembler import Assembler, Event, Kind
from quire.api.conversation import conversation_job
from quire.api.dialects.ollama.request import (
    EmbeddingsRequest,
    EmbedRequest,
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateRequest,
    chat_conversation,
    read_sampling,
    refuse_images,
    text_conversation,
)
from quire.api.history_parts import sight_of
from quire.api.job import Answer, Head, Job, Usage, common_fields, new_head, served_name
from quire.api.output_plan import OutputPlan
from quire.api.state import ApiState
from quire.api.template_input import parsed_arguments
from quire.api.text_prompts import filled_in
from quire.api.token_logprobs import TokenNames, chat_logprobs
from quire.engine.output import OutputChunk
from quire.engine.pooling import NOTHING_SAMPLED, embedding
from quire.engine.prompts import off_loop
from quire.engine.sentences import cut, pooling_of, prompt_before
from quire.http.call import Call
from quire.http.refusals import OLLAMA_ROOT, Refusal
from quire.http.wire import parse
from quire.request import FinishReason, SamplingParams

_encode = msgspec.json.Encoder().encode


async def ollama_chat_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of a chat and render its prompt.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(OllamaChatRequest, body, ignored=ignored)
    served_name(state, request.model)
    sampling = read_sampling(request, state.model.generation_defaults, ignored)
    conversation = await off_loop(
        len(request.messages or ()), chat_conversation, request, ignored, sight_of(state, call, request)
    )
    answer = partial(_answer, state, request)
    fields = _fields(request, ignored)
    return await conversation_job(
        state, call, request, conversation, sampling, "chat-", answer, ignored, **fields
    )


async def ollama_generate_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of a text, and render its prompt unless it is ``raw`` or the model has no template.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(OllamaGenerateRequest, body, ignored=ignored)
    served_name(state, request.model)
    sampling = read_sampling(request, state.model.generation_defaults, ignored)
    fields = _fields(request, ignored)
    if not (request.raw or request.suffix) and state.frontend.chat_template.names:
        answer = partial(_answer, state, request)
        conversation = text_conversation(request, sight_of(state, call, request))
        job = await conversation_job(
            state, call, request, conversation, sampling, "gen-", answer, ignored, **fields
        )
        prompts = job.prompts
    else:
        refuse_images(request, "a prompt without a chat template shows none")
        text = "\n\n".join(filter(None, ("" if request.raw else request.system, request.prompt)))
        if request.suffix:
            prompts, sampling = await filled_in(state, [request.prompt], request.suffix, sampling)
        else:
            prompts = [await state.frontend.prompts.tokenize(text)]
        answered = _answer(state, request, new_head(state, call, "gen-", request.model), None, sampling)
        job = Job(
            prompts, sampling, answered, continues=True, **common_fields(request, call, ignored) | fields
        )
    return replace(job, prompts=[_behind(state, request.context or [], prompts[0])])


def _behind(state: ApiState, context: Sequence[int], prompt: str | Sequence[int]) -> Sequence[int]:
    """Return ``prompt`` behind the ids of the conversation so far; only the first of all is a BOS."""
    assert not isinstance(prompt, str)
    if not context:
        return prompt
    begins = len(prompt) > 0 and prompt[0] == state.frontend.tokenizer.bos_token_id
    if state.model.vision is not None:
        behind: Callable[..., Sequence[int]] = import_module("quire.api.images").behind
        return behind(context, prompt, 1 if begins else 0, state.model.vision.image_token_id)
    return [*context, *(prompt[1:] if begins else prompt)]


def _fields(request: OllamaFields, ignored: list[str] | None) -> dict[str, Any]:
    """The durations of the answer are those of its timing."""
    return {"timing": True}


def _answer(
    state: ApiState, request: OllamaFields, head: Head, plan: OutputPlan | None, sampling: SamplingParams
) -> OllamaAnswer:
    names = TokenNames(state.frontend.tokenizer, as_ids=False) if request.logprobs else None
    is_chat = isinstance(request, OllamaChatRequest)
    with_context = isinstance(request, OllamaGenerateRequest) and not request.raw
    return OllamaAnswer(head, request, plan, names, is_chat=is_chat, with_context=with_context)


@dataclass(frozen=True, slots=True)
class Line:
    """The fields that every line of an answer begins with."""

    model: str
    created: int  # seconds since 1970

    def with_(self, values: dict[str, Any], *, done: bool) -> dict[str, Any]:
        created = datetime.fromtimestamp(self.created, UTC).isoformat().replace("+00:00", "Z")
        return {"model": self.model, "created_at": created, **values, "done": done}


def loaded_line(model: str, created: int, values: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request that asks only that the model is loaded."""
    return Line(model, created).with_({**values, "done_reason": "load"}, done=True)


class OllamaAnswer(Answer):
    """An answer as one object, or as a line per piece and a last one with the counts and durations."""

    media_type = b"application/x-ndjson"

    def __init__(
        self,
        head: Head,
        request: OllamaFields,
        plan: OutputPlan | None,
        names: TokenNames | None,
        *,
        is_chat: bool,
        with_context: bool,
    ) -> None:
        self.head = head
        self.streamed = request.stream
        self._names = names
        self._is_chat = is_chat
        self._line = Line(request.model or head.model, head.created)
        self._context: list[int] | None = [] if with_context else None
        self._end = ""
        self._assembler = Assembler(plan, lambda call: "call_" + head.id_of("call", call)[:8])

    def body(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        (chunk,) = chunks
        self._begin(prompts)
        values = self._values(chunk)
        return _encode(self._line.with_({**values, **self._last(usage)}, done=True))

    def opening(self, prompts: Sequence[Sequence[int]], echoes: Sequence[str], usage: Usage) -> bytes:
        self._begin(prompts)
        return b""

    def frame(self, index: int, chunk: OutputChunk, usage: Usage) -> bytes:
        values = self._values(chunk)
        message = values.get("message", values)
        if not any(message.get(name) for name in ("content", "response", "thinking", "tool_calls")) and (
            "logprobs" not in values
        ):
            return b""
        return _encode(self._line.with_(values, done=False)) + b"\n"

    def closing(self, usage: Usage) -> bytes:
        values = self._content([], []) | self._last(usage)
        return _encode(self._line.with_(values, done=True)) + b"\n"

    def error(self, refusal: Refusal) -> bytes:
        return refusal.body(OLLAMA_ROOT) + b"\n"

    def _begin(self, prompts: Sequence[Sequence[int]]) -> None:
        if self._context is not None:
            self._context += prompts[0]

    def _values(self, chunk: OutputChunk) -> dict[str, Any]:
        if chunk.finish_reason is not None:
            self._end = "length" if chunk.finish_reason is FinishReason.LENGTH else chunk.finish_reason.value
        if self._context is not None:
            self._context += chunk.token_ids
        events = self._assembler.feed(chunk.text, chunk.finish_reason)
        calls = [event.part for event in events if event.verb == "close" and event.part.kind is Kind.CALL]
        values = self._content(
            events,
            [
                {
                    "id": p.id,
                    "function": {"index": p.call, "name": p.name, "arguments": parsed_arguments(p.text)},
                }
                for p in calls
            ],
        )
        if self._names is not None and chunk.logprobs:
            values["logprobs"] = chat_logprobs(chunk.logprobs, self._names)["content"]
        return values

    def _content(self, events: Sequence[Event], calls: list[dict[str, Any]]) -> dict[str, Any]:
        text, thinking = (
            "".join([e.text for e in events if e.verb == "more" and e.part.kind is kind])
            for kind in (Kind.TEXT, Kind.REASONING)
        )
        beside: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {"response": text, **beside}
        if calls:
            beside["tool_calls"] = calls
        return {"message": {"role": "assistant", "content": text, **beside}}

    def _last(self, usage: Usage) -> dict[str, Any]:
        """Return the end: counts, and durations in nanoseconds. Nothing is loaded for a request."""
        first_ms, total_ms = usage.timing["first_token_ms"] or 0.0, usage.timing["total_ms"]
        values = {
            "done_reason": self._end,
            "total_duration": _ns(total_ms),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_cached_count": usage.cached_tokens,
            "prompt_eval_duration": _ns(usage.timing["prefill_ms"] or 0.0),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(total_ms - first_ms),
        }
        return values if self._context is None else {**values, "context": self._context}


def _ns(milliseconds: float) -> int:
    return round(milliseconds * 1e6)


async def embed_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of ``/api/embed`` and tokenize its texts.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(EmbedRequest, body, ignored=ignored)
    head = new_head(state, call, "embd-", request.model)
    texts, lead = (
        [request.input] if isinstance(request.input, str) else request.input,
        prompt_before(state.model, None),
    )
    prompts = [await state.frontend.prompts.tokenize(lead + text) for text in texts]
    if request.truncate:
        prompts = [cut(ids, state.model.max_model_len, state.frontend.tokenizer) for ids in prompts]
    answer = EmbedAnswer(head, request)
    return Job(
        prompts,
        NOTHING_SAMPLED,
        answer,
        pooling=pooling_of(state.model, None),
        prompt_param="input",
        **common_fields(request, call, ignored) | {"timing": True},
    )


async def embeddings_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of ``/api/embeddings``.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(EmbeddingsRequest, body, ignored=ignored)
    head = new_head(state, call, "embd-", request.model)
    prompt = await state.frontend.prompts.tokenize(prompt_before(state.model, None) + request.prompt)
    answer = EmbedAnswer(head, request)
    fields = common_fields(request, call, ignored)
    return Job([prompt], NOTHING_SAMPLED, answer, pooling=pooling_of(state.model, None), **fields)


class EmbedAnswer(Answer):
    """Vectors; those of the older form have the length that the model gives them."""

    def __init__(self, head: Head, request: EmbedRequest | EmbeddingsRequest) -> None:
        self.head = head
        self._request = request

    def body(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        request = self._request
        if isinstance(request, EmbeddingsRequest):
            vector = _vector(chunks[0], None, normalize=False)
            return _encode({"embedding": vector, "prompt_eval_count": usage.prompt_tokens})
        timings = usage.timing if isinstance(usage.timing, list) else [usage.timing]
        return _encode(
            {
                "model": request.model or self.head.model,
                "embeddings": [_vector(chunk, request.dimensions, normalize=True) for chunk in chunks],
                "total_duration": _ns(timings[0]["total_ms"]),
                "load_duration": 0,
                "prompt_eval_count": usage.prompt_tokens,
            }
        )


def _vector(chunk: OutputChunk, dimensions: int | None, *, normalize: bool) -> list[float]:
    assert chunk.pooled is not None
    return list(embedding(chunk.pooled, dimensions=dimensions, normalize=normalize).tolist())

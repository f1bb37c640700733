"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``: jobs, and answers as a message of content blocks.

message_start (content_block_start content_block_delta* content_block_stop)* message_delta message_stop
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from quire.api.assembler import Assembler, Event, Kind, Part
from quire.api.context_management import check_edits
from quire.api.conversation import conversation_job
from quire.api.dialects.anthropic.request import (
    CountTokensRequest,
    MessagesRequest,
    Metadata,
    check_thread,
    output_form,
    read_conversation,
)
from quire.api.history_parts import sight_of
from quire.api.job import Answer, Head, Job, Usage, given_sampling, sampling_params, served_name
from quire.api.output_plan import OutputPlan
from quire.api.state import ApiState
from quire.api.template_input import parsed_arguments
from quire.engine.output import OutputChunk
from quire.engine.prompts import off_loop
from quire.http.call import Call
from quire.http.events import named_event
from quire.http.refusals import ANTHROPIC_ROOT, Refusal
from quire.http.wire import parse
from quire.request import FinishReason, SamplingParams, Tenant

_encode = msgspec.json.Encoder().encode
_DELTAS = {
    Kind.TEXT: ("text_delta", "text"),
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


async def messages_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of a message and render its prompt.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(MessagesRequest, body, ignored=ignored)
    served_name(state, request.model)
    check_thread(request.thread, ignored)
    check_edits(request.context_management, request.messages, state.model.max_model_len, ignored)
    conversation = await off_loop(
        len(request.messages), read_conversation, request, ignored, sight_of(state, call, request)
    )
    metadata = parse(Metadata, request.metadata or {}, prefix="metadata.", ignored=ignored)
    params = given_sampling(request)
    if request.stop_sequences:
        params["stop"] = request.stop_sequences
    sampling = sampling_params(
        params,
        state.model.generation_defaults,
        max_tokens=request.max_tokens,
        form=output_form(request, ignored),
        client_names={"stop": "stop_sequences"},
    )

    def answer(head: Head, plan: OutputPlan | None, sampling: SamplingParams) -> Answer:
        return MessageAnswer(head, plan, streamed=request.stream)

    if metadata.user_id and ignored is not None and not state.reads_tenants(call):
        ignored.append("metadata.user_id")
    job = await conversation_job(state, call, request, conversation, sampling, "msg_", answer, ignored)
    tenant = Tenant(call.tenant or metadata.user_id, call.weight)
    return replace(job, terms=replace(job.terms, tenant=tenant))


async def count_tokens(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> dict[str, int]:
    """Return ``{input_tokens}``: the length of the prompt that the same fields make in ``/v1/messages``.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(CountTokensRequest, body, ignored=ignored)
    served_name(state, request.model)
    check_thread(request.thread, ignored)
    output_form(request, ignored)
    check_edits(request.context_management, request.messages, state.model.max_model_len, ignored)
    conversation = await off_loop(
        len(request.messages), read_conversation, request, ignored, sight_of(state, call, request)
    )
    _, prompt = await conversation.prompt(state)
    return {"input_tokens": len(prompt)}


class MessageAnswer(Answer):
    """The one message that answers a request."""

    def __init__(self, head: Head, plan: OutputPlan | None, *, streamed: bool) -> None:
        self.head = head
        self.streamed = streamed
        self._assembler = Assembler(plan, lambda call: "toolu_" + head.id_of("call", call)[:24])
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    def body(self, chunks: Sequence[OutputChunk], prompts: Sequence[Sequence[int]], usage: Usage) -> bytes:
        (chunk,) = chunks
        self._assembler.feed(chunk.text, chunk.finish_reason)
        self._note_end(chunk)
        message = self._message([_block(part) for part in self._assembler.parts], usage)
        return _encode({**message, **usage.beside()})

    def opening(self, prompts: Sequence[Sequence[int]], echoes: Sequence[str], usage: Usage) -> bytes:
        start = Usage(usage.prompt_tokens, 0, usage.cached_tokens)
        return named_event("message_start", {"message": self._message([], start)})

    def frame(self, index: int, chunk: OutputChunk, usage: Usage) -> bytes:
        last = chunk.finish_reason is not None
        events = self._assembler.feed(chunk.text, chunk.finish_reason)
        if last:
            self._note_end(chunk)
        return b"".join([_block_event(event) for event in events])

    def closing(self, usage: Usage) -> bytes:
        end = named_event("message_delta", {"delta": self._end, "usage": usage_json(usage), **usage.beside()})
        return end + named_event("message_stop", {})

    def error(self, refusal: Refusal) -> bytes:
        return b"event: error\ndata: " + refusal.body(ANTHROPIC_ROOT) + b"\n\n"

    def _note_end(self, chunk: OutputChunk) -> None:
        reason, sequence = "end_turn", None
        if chunk.finish_reason is FinishReason.DEADLINE:
            reason = "deadline"
        elif isinstance(chunk.stop_reason, str):
            reason, sequence = "stop_sequence", chunk.stop_reason
        elif chunk.finish_reason is FinishReason.LENGTH:
            reason = "max_tokens"
        elif self._assembler.num_calls:
            reason = "tool_use"
        self._end = {"stop_reason": reason, "stop_sequence": sequence}

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        head = self.head
        return {
            "id": head.id,
            "type": "message",
            "role": "assistant",
            "model": head.model,
            "content": content,
            **self._end,
            "usage": usage_json(usage),
            "system_fingerprint": head.fingerprint,
            "determinism": head.determinism,
        }


def usage_json(usage: Usage) -> dict[str, int]:
    """Anthropic counts tokens read from the cache apart from the other input tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _block(part: Part, *, begun: bool = False) -> dict[str, Any]:
    """Return the content block of a part; ``begun``: empty, as it starts in a stream."""
    text = "" if begun else part.text
    if part.kind is Kind.TEXT:
        return {"type": "text", "text": text}
    if part.kind is Kind.REASONING:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "tool_use", "id": part.id, "name": part.name, "input": parsed_arguments(text)}


def _block_event(event: Event) -> bytes:
    part = event.part
    if event.verb == "open":
        values: dict[str, Any] = {"index": part.index, "content_block": _block(part, begun=True)}
        return named_event("content_block_start", values)
    if event.verb == "close":
        return named_event("content_block_stop", {"index": part.index})
    kind, name = _DELTAS[part.kind]
    return named_event(
        "content_block_delta", {"index": part.index, "delta": {"type": kind, name: event.text}}
    )

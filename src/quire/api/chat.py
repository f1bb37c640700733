"""``/v1/chat/completions``: from wire and messages to a `Job`; its choices with content, reasoning and tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from quire.api.answer_form import NO_TOOLS, chat_tools, structured_outputs, tool_use
from quire.api.chat_messages import template_messages
from quire.api.conversation import (
    Conversation,
    OutputPlan,
    Thinking,
    conversation_job,
    template_variables,
)
from quire.api.job import Answer, Head, Job
from quire.api.parts import (
    Assembler,
    Choices,
    ChoicesAnswer,
    Event,
    Kind,
    Part,
    TokenNames,
    chat_logprobs,
    prompt_logprobs,
)
from quire.api.protocol import (
    FORM_FIELDS,
    REST_OF_CONTEXT,
    TEMPLATE_FIELDS,
    ChatPrompt,
    ChatRequest,
    given_sampling,
    sampling_params,
    stream_options,
)
from quire.api.state import ApiState
from quire.engine.output import OutputChunk
from quire.engine.prompts import INLINE_ELEMENTS
from quire.errors import RequestError, clip
from quire.http.call import Call
from quire.http.wire import not_allowed, parse
from quire.request import FinishReason, SamplingParams, TokenLogprobs

NO_VARIABLES: Mapping[str, Any] = {}
_encode = msgspec.json.Encoder().encode


async def chat_job(state: ApiState, call: Call, body: Any, ignored: list[str] | None) -> Job:
    """Check the body of a chat completion and render its prompt.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    request = parse(ChatRequest, body, ignored=ignored)
    options = stream_options(request, ignored)
    state.check_model(request.model)
    sampling = sampling_params(
        given_sampling(request),
        state.model.generation_defaults,
        max_tokens=_max_tokens(request),
        logprobs=_num_logprobs(request) if request.logprobs or request.top_logprobs else None,
        form=None
        if request.model_fields_set.isdisjoint(FORM_FIELDS)
        else structured_outputs(request, ignored),
        client_names={"logprobs": "top_logprobs"},
    )

    def answer(head: Head, plan: OutputPlan | None, sampling: SamplingParams) -> Answer:
        choices = ChatChoices(
            TokenNames(state.frontend.tokenizer, as_ids=request.return_tokens_as_token_ids),
            with_logprobs=bool(request.logprobs),
            with_ids=request.return_token_ids,
            num_prompt_logprobs=request.prompt_logprobs,
            plan=plan,
            head=head,
        )
        return ChoicesAnswer(head, choices, options, sampling.n)

    if len(request.messages) <= INLINE_ELEMENTS:
        conversation = chat_conversation(request, ignored, request)
    else:
        conversation = await asyncio.to_thread(chat_conversation, request, ignored, request)
    return await conversation_job(state, call, request, conversation, sampling, "chatcmpl-", answer, ignored)


def chat_conversation(
    request: ChatPrompt, ignored: list[str] | None, chat: ChatRequest | None = None
) -> Conversation:
    """Return the conversation of a chat prompt. ``chat``: the same, if it is a whole chat completion.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    effort = chat.reasoning_effort if chat else None
    choice, parallel = (chat.tool_choice, chat.parallel_tool_calls) if chat else (None, None)
    use, variables = NO_TOOLS, NO_VARIABLES
    if request.tools or choice is not None:
        use = tool_use(chat_tools(request.tools, ignored), choice, parallel, function=".function")
    if not request.model_fields_set.isdisjoint(TEMPLATE_FIELDS):
        variables = template_variables(
            request.chat_template_kwargs,
            effort=effort,
            documents=request.documents,
            continues=request.continue_final_message,
            begins=request.add_generation_prompt,
        )
    return Conversation(
        template_messages(request.messages, ignored),
        use,
        variables,
        Thinking(chat.thinking_token_budget if chat else None, effort),
        separate_reasoning=chat is None or chat.separate_reasoning,
        with_reasoning=chat is None or chat.include_reasoning,
    )


def _max_tokens(request: ChatRequest) -> int | None:
    """``max_completion_tokens``, or its older name; None is the rest of the context."""
    new, old = request.max_completion_tokens, request.max_tokens
    if new is not None and old is not None and new != old:
        raise RequestError(
            f"max_completion_tokens = {clip(new)} and max_tokens = {clip(old)} contradict each other: "
            "send one of them.",
            param="max_completion_tokens",
        )
    if new is not None and new < 1 and new != REST_OF_CONTEXT:
        raise not_allowed(
            "max_completion_tokens", new, "an integer ≥ 1, or null or -1 for the rest of the context"
        )
    limit = new if new is not None else old
    return None if limit == REST_OF_CONTEXT else limit


def _num_logprobs(request: ChatRequest) -> int:
    """An integer is the completions' form of the field: that many alternatives, and 0 is false."""
    if request.logprobs:
        top = None if request.logprobs is True else request.logprobs
        return request.top_logprobs if request.top_logprobs is not None else top or 0
    raise RequestError(
        f"top_logprobs = {clip(request.top_logprobs)} is only allowed with logprobs = true.",
        param="top_logprobs",
    )


@dataclass(slots=True)
class ChatChoices(Choices):
    """The choices of one answer. ``plan`` None: the model's text is the content as it is."""

    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"

    names: TokenNames
    with_logprobs: bool
    with_ids: bool
    num_prompt_logprobs: int | None
    plan: OutputPlan | None
    head: Head
    _assemblers: dict[int, Assembler] = field(default_factory=dict)  # by choice

    def opening(self, index: int, echo: str) -> bytes | None:
        """Return the choice that names the role, before any content; chats are not echoed."""
        return (
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
            % index
        )

    def delta(self, index: int, chunk: OutputChunk) -> bytes | None:
        """Return the choice object of one chunk; None if there is nothing to show yet."""
        last = chunk.finish_reason is not None
        text_only = not self.with_logprobs and not self.with_ids
        if text_only and self.plan is None:
            if not last and not chunk.text:
                return None
            content = b'{"content":%b}' % _encode(chunk.text) if chunk.text else b"{}"
            if not last:
                return b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, content)
            reasons = _encode(chunk.finish_reason), _encode(chunk.stop_reason)
            form = b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b}'
            return form % (index, content, *reasons)
        delta = _delta(self._assembler(index).feed(chunk.text, chunk.finish_reason))
        if text_only and not last and not delta:
            return None
        if not delta and self.plan is None and not last:
            delta = {"content": ""}  # a token whose text is held back
        value: dict[str, Any] = {"index": index, "delta": delta, **self._beside_text(index, chunk)}
        if not last:
            del value["stop_reason"]
        return _encode(value)

    def whole(self, index: int, chunk: OutputChunk, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the choice object of a whole answer, given as one chunk."""
        assembler = self._assembler(index)
        assembler.feed(chunk.text, chunk.finish_reason)
        calls = [_call(part, part.text) for part in assembler.parts if part.kind is Kind.CALL]
        content = assembler.text(Kind.TEXT)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        message |= _reasoning(assembler.text(Kind.REASONING))
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, **self._beside_text(index, chunk)}

    def beside(self, prompt_token_ids: Sequence[int]) -> dict[str, Any]:
        """Return fields beside ``choices``, in a whole answer and in the first chunk."""
        return {"prompt_token_ids": prompt_token_ids} if self.with_ids else {}

    def scored(self, index: int, chunk: OutputChunk) -> dict[str, Any]:
        """Return the prompt's log-probabilities with the first chunk of the first choice."""
        return {} if index else prompt_logprobs(chunk, self.num_prompt_logprobs, self.names)

    def _assembler(self, index: int) -> Assembler:
        assembler = self._assemblers.get(index)
        if assembler is None:
            assembler = Assembler(self.plan, lambda call: "call_" + self.head.id_of("call", index, call)[:24])
            self._assemblers[index] = assembler
        return assembler

    def _beside_text(self, index: int, chunk: OutputChunk) -> dict[str, Any]:
        """Return the fields of a choice beside its message or delta."""
        finish: str | None = chunk.finish_reason
        if chunk.finish_reason is FinishReason.STOP and self._assembler(index).num_calls:
            finish = "tool_calls"
        fields = {
            "logprobs": self._logprobs(chunk.logprobs),
            "finish_reason": finish,
            "stop_reason": chunk.stop_reason,
        }
        return {**fields, "token_ids": chunk.token_ids} if self.with_ids else fields

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        return chat_logprobs(logprobs or (), self.names) if self.with_logprobs else None


def _delta(events: Sequence[Event]) -> dict[str, Any]:
    """Return the ``delta`` object of events; empty if they add nothing."""
    delta: dict[str, Any] = {}
    for verb, part, text in events:
        if part.kind is Kind.CALL and verb != "close":
            call: dict[str, Any] = {"index": part.call}
            call |= _call(part, "") if verb == "open" else {"function": {"arguments": text}}
            delta.setdefault("tool_calls", []).append(call)
        elif verb == "more":
            pieces = {"content": text} if part.kind is Kind.TEXT else _reasoning(text)
            delta |= {name: delta.get(name, "") + piece for name, piece in pieces.items()}
    return delta


def _reasoning(text: str) -> dict[str, str]:
    """vLLM's newer name, and the older one of DeepSeek, SGLang and earlier vLLM."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _call(part: Part, arguments: str) -> dict[str, Any]:
    return {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": arguments}}

"""``/v1/chat/completions``: from wire and messages to a `Job`; its choices with content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from quire.api.conversation import (
    MALFORMED,
    Conversation,
    OutputPlan,
    Thinking,
    call_message,
    chat_tools,
    conversation_job,
    template_variables,
    tool_use,
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
    ChatPrompt,
    ChatRequest,
    TextContent,
    given_sampling,
    sampling_params,
    stream_options,
    structured_outputs,
)
from quire.api.state import ApiState
from quire.engine.large_input import off_loop
from quire.engine.output import OutputChunk
from quire.errors import RequestError, clip
from quire.http.wire import (
    Text,
    Wire,
    not_allowed,
    parse,
)
from quire.request import FinishReason, SamplingParams, TokenLogprobs

_encode = msgspec.json.Encoder().encode


async def chat_job(state: ApiState, body: Any, ignored: list[str] | None) -> Job:
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
        logprobs=_num_logprobs(request),
        form=structured_outputs(request, ignored),
        client_names={"logprobs": "top_logprobs"},
    )

    def answer(head: Head, plan: OutputPlan | None, sampling: SamplingParams) -> Answer:
        choices = ChatChoices(
            TokenNames(state.frontend.tokenizer, as_ids=request.return_tokens_as_token_ids),
            with_logprobs=request.logprobs,
            with_ids=request.return_token_ids,
            num_prompt_logprobs=request.prompt_logprobs,
            plan=plan,
            head=head,
        )
        return ChoicesAnswer(head, choices, options, sampling.n)

    conversation = await off_loop(len(request.messages), chat_conversation, request, ignored, request)
    return await conversation_job(state, request, conversation, sampling, "chatcmpl-", answer, ignored)


def chat_conversation(
    request: ChatPrompt, ignored: list[str] | None, chat: ChatRequest | None = None
) -> Conversation:
    """Return the conversation of a chat prompt. ``chat``: the same, if it is a whole chat completion.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    tools = chat_tools(request.tools, ignored)
    effort = chat.reasoning_effort if chat else None
    choice, parallel = (chat.tool_choice, chat.parallel_tool_calls) if chat else (None, None)
    return Conversation(
        template_messages(request.messages, ignored),
        tool_use(tools, choice, parallel, function=".function"),
        template_variables(
            request.chat_template_kwargs,
            effort=effort,
            documents=request.documents,
            continues=request.continue_final_message,
            begins=request.add_generation_prompt,
        ),
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
    if new is not None and new < 1:
        raise not_allowed("max_completion_tokens", new, "an integer ≥ 1, or null")
    return new if new is not None else old


def _num_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise RequestError(
            f"top_logprobs = {clip(request.top_logprobs)} is only allowed with logprobs = true.",
            param="top_logprobs",
        )
    return None


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
        text_only = not last and not self.with_logprobs and not self.with_ids
        if text_only and self.plan is None:
            if not chunk.text:
                return None
            content = _encode(chunk.text)
            return b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (
                index,
                content,
            )
        delta = _delta(self._assembler(index).feed(chunk.text, last=last))
        if text_only and not delta:
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
        assembler.feed(chunk.text, last=True)
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


class FunctionCall(Wire):
    """The function of a tool call in the history."""

    name: Text
    arguments: Annotated[str | dict[str, Any], Field(description="a string of JSON, or an object")] = "{}"


class ToolCall(Wire):
    """A tool call of an assistant message in the history."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: Annotated[FunctionCall, Field(description="an object with a name and arguments")]


class Message(Wire):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextContent | None = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(description="a list of tool calls")] = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    thinking: Text | None = None


class TextPart(Wire):
    """A part of a content."""

    type: Text
    text: Text


def text_of(
    content: str | list[Any], where: str, kinds: tuple[str, ...] = ("text",), ignored: list[str] | None = None
) -> str:
    """Return the text of a string, or of text parts of the types ``kinds``, joined by line breaks.

    Raises:
        RequestError: names the part of ``where``, and what is allowed.
    """
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise RequestError(
                f"{place} = {clip(part)} is not allowed: it must be an object like "
                f'{{"type": "{kinds[0]}", "text": "…"}}.',
                param=place,
                code="invalid_type",
            )
        if kind not in kinds:
            raise RequestError(
                f"{place} is a part of type {clip(kind)}, but the model is text only. Supported part types: "
                f"{', '.join(kinds)}.",
                param=place,
                code="unsupported_content",
            )
        texts.append(parse(TextPart, part, prefix=place + ".", ignored=ignored).text)
    return "\n".join(texts)


# Fields of a message that pass to the template as they are.
_PASSED = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")


def template_messages(messages: list[Any], ignored: list[str] | None = None) -> list[dict[str, Any]]:
    """Return the messages of a chat completion as a chat template reads them.

    Raises:
        RequestError: names ``messages[i].…``, the value and what is allowed.
    """
    return [_message(message, f"messages[{i}]", ignored) for i, message in enumerate(messages)]


def _message(raw: Any, where: str, ignored: list[str] | None) -> dict[str, Any]:
    message = parse(Message, raw, prefix=where + ".", ignored=ignored)
    if message.content is None and not (message.role == "assistant" and message.tool_calls):
        raise RequestError(
            f"{where}.content is required: only an assistant message with tool_calls may leave it out.",
            param=where + ".content",
            code="missing_required_parameter",
        )
    if message.tool_calls and message.role != "assistant":
        raise RequestError(
            f"{where}.tool_calls is only allowed in an assistant message, not in one of {message.role!r}.",
            param=where + ".tool_calls",
        )
    result: dict[str, Any] = {"role": message.role, "content": None}
    if message.content is not None:
        result["content"] = text_of(message.content, where + ".content", ignored=ignored)
    result |= {name: value for name in _PASSED if (value := getattr(message, name)) is not None}
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        result["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in calls]
    return result


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    """OpenAI sends arguments as a string of JSON; HF templates expect the object."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        shown = f"{where}.function.arguments = {clip(arguments)}"
        try:
            arguments = msgspec.json.decode(arguments.encode() or b"{}")
        except MALFORMED as error:
            message = f"{shown} is not JSON: {error}."
            raise RequestError(message, param=where + ".function.arguments") from None
        if not isinstance(arguments, dict):
            raise RequestError(f"{shown} must be a JSON object.", param=where + ".function.arguments")
    made = call_message(call.id, call.function.name, arguments)
    if call.id is None:
        del made["id"]
    return made

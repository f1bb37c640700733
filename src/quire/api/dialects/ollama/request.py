"""Ollama's API: its wire models, and how they become a `Conversation` and `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from quire.api.answer_form import chat_tools, tool_use
from quire.api.conversation import Conversation, template_messages
from quire.api.fields import EFFORTS, DeadlineField, RequestFields, Tools
from quire.api.history_parts import newest_index, part_text
from quire.api.job import sampling_params
from quire.api.template_input import template_variables
from quire.api.thinking import Thinking
from quire.errors import RequestError
from quire.http.wire import (
    AnyObject,
    Boolean,
    Integer,
    Number,
    Past,
    Text,
    TokenIds,
    Wire,
    not_allowed,
    parse,
)
from quire.request import SamplingParams
from quire.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:  # loaded with a model that takes images alone
    from quire.api.images import Sight

# Ours → the client's, of the options that are called otherwise.
_OPTION_NAMES = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}


class Options(Wire):
    """``options``: how to sample. What is not given is the model's default, not Ollama's."""

    num_predict: Integer | None = None
    seed: Integer | None = None
    stop: Annotated[str | list[str] | None, Field(description="a string or a list of strings")] = None
    temperature: Number | None = None
    top_k: Integer | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    repeat_penalty: Number | None = None
    repeat_last_n: Integer | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None


class OllamaFields(RequestFields):
    """Fields of chats and texts."""

    stream: Boolean = True
    options: AnyObject | None = None
    format: Annotated[
        str | dict[str, Any] | None, Field(description="'json', or a JSON schema (an object)")
    ] = None
    think: Annotated[
        bool | Literal["low", "medium", "high", "max"] | None,
        Field(description="true, false, 'low', 'medium', 'high' or 'max'"),
    ] = None
    logprobs: Boolean = False
    top_logprobs: Integer | None = None
    deadline_ms: DeadlineField | None = None


class OllamaChatRequest(OllamaFields):
    """Body of ``/api/chat``."""

    messages: Annotated[list[Any] | None, Field(description="a list of messages")] = None
    tools: Tools | None = None


class OllamaGenerateRequest(OllamaFields):
    """Body of ``/api/generate``. ``context``: the ids that the answer before it returned."""

    prompt: Text = ""
    suffix: Text = ""
    system: Text = ""
    raw: Boolean = False
    context: TokenIds | None = None
    images: Annotated[list[Any] | None, Field(description="a list of images")] = None


class OllamaMessage(Past):
    """One of ``messages``."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text = ""
    thinking: Text | None = None
    tool_calls: Annotated[list[Any] | None, Field(description="a list of tool calls")] = None
    images: Annotated[list[Any] | None, Field(description="a list of images")] = None
    tool_name: Text | None = None
    tool_call_id: Text | None = None


def read_sampling(
    request: OllamaFields, defaults: Mapping[str, Any], ignored: list[str] | None
) -> SamplingParams:
    """Return how to sample. ``defaults``: the model's.

    Raises:
        RequestError: names ``options.…``, the value and what is allowed.
    """
    options = parse(Options, request.options or {}, prefix="options.", ignored=ignored)
    params = options.model_dump(exclude_none=True, exclude={"num_predict", "repeat_penalty"})
    if options.repeat_penalty is not None:
        params["repetition_penalty"] = options.repeat_penalty
    if options.seed == -1:
        del params["seed"]
    limit = options.num_predict
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs is only allowed with logprobs = true.", param="top_logprobs")
    return sampling_params(
        params,
        defaults,
        # Ollama's -1 is no limit, and -2 the rest of the context.
        max_tokens=None if limit is None or limit in (0, -1, -2) else limit,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        form=_form(request.format),
        client_names={
            **{name: f"options.{_OPTION_NAMES.get(name, name)}" for name in (*params, "max_tokens")},
            "logprobs": "top_logprobs",
        },
    )


def _form(value: Any) -> StructuredOutputsParams | None:
    if value is None or value == "":
        return None
    if value == "json":
        return StructuredOutputsParams(json_object=True, param="format")
    if not isinstance(value, dict):
        raise not_allowed("format", value, "'json', or a JSON schema (an object)")
    return StructuredOutputsParams(json=value, param="format")


def chat_conversation(
    request: OllamaChatRequest, ignored: list[str] | None, sight: Sight | None = None
) -> Conversation:
    """Return the conversation of a chat.

    Raises:
        RequestError: names the field, the value and what is allowed.
    """
    messages = _messages(request.messages or [], ignored, sight)
    tools = tool_use(chat_tools(request.tools, ignored), None, None, function=".function")
    last = messages[-1]
    continues = last["role"] == "assistant" and not last.get("tool_calls")
    return Conversation(messages, tools, _variables(request, continues), _thinking(request))


def text_conversation(request: OllamaGenerateRequest, sight: Sight | None = None) -> Conversation:
    """Return the conversation that a text, its images and its ``system`` are."""
    content: Any = request.prompt
    if sight is None:
        refuse_images(request, "the model is text only and cannot see them")
    elif request.images:
        parts = sight.base64_parts(request.images, "images")
        content = [*(sight.image(part, "images", "user") for part in parts), text_part(request.prompt)]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if request.system:
        messages.insert(0, {"role": "system", "content": request.system})
    tools = tool_use([], None, None, function="")
    return Conversation(messages, tools, _variables(request, False), _thinking(request))


def refuse_images(request: OllamaGenerateRequest, reason: str) -> None:
    """Raise `RequestError` for the first image of a request that can have none."""
    if request.images:
        raise RequestError(
            f"images is not supported here: {reason}.", param="images", code="unsupported_content"
        )


def _effort(request: OllamaFields) -> str | None:
    """True is "as much as the model does by itself", so it is no level."""
    if isinstance(request.think, bool):
        return None if request.think else "none"
    return EFFORTS.get(request.think or "", request.think)


def _variables(request: OllamaFields, continues: bool) -> dict[str, Any]:
    kwargs = {"enable_thinking": True, "thinking": True} if request.think is True else None
    return template_variables(kwargs, effort=_effort(request), continues=continues)


def _thinking(request: OllamaFields) -> Thinking:
    # "high" has no limit either, and is listed as ignored where the model does not reason.
    effort = "high" if request.think is True else _effort(request)
    return Thinking(None, effort, effort_param="think")


def _messages(raws: list[Any], ignored: list[str] | None, sight: Sight | None) -> list[dict[str, Any]]:
    """Return the messages as a chat template reads them.

    Calls of Ollama need no ids, and results name a tool: a result belongs to the first call of that name without one.
    """
    messages: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # calls without a result: id, name
    newest = newest_index(raws)
    for i, raw in enumerate(raws):
        message = parse(OllamaMessage, raw, prefix=f"messages[{i}].", ignored=ignored)
        one: dict[str, Any] = {"role": message.role}
        if sight is not None and message.images:
            images = sight.base64_parts(message.images, f"messages[{i}].images")
            one["content"] = [*images, text_part(message.content)]
        else:
            lines = [
                part_text({"type": "image"}, f"messages[{i}].images[{j}]", newest=i == newest).text
                for j in range(len(message.images or ()))
            ]
            one["content"] = "\n".join([message.content, *lines])
        if message.thinking:
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            one["tool_calls"] = [_with_id(call, i, j) for j, call in enumerate(message.tool_calls)]
            one["content"] = one["content"] or None
            waiting += [
                (call["id"], _tool_name(call)) for call in one["tool_calls"] if isinstance(call, dict)
            ]
        if message.role == "tool":
            name = message.tool_name
            answered = next((call for call in waiting if name in (None, call[1])), ("call00000", ""))
            waiting = [call for call in waiting if call is not answered]
            one["tool_call_id"] = message.tool_call_id or answered[0]
            one["name"] = name or answered[1] or None
        messages.append(one)
    return template_messages(messages, ignored, sight)


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _with_id(call: Any, i: int, j: int) -> Any:
    """Mistral's templates want an id of 9 characters."""
    return {**call, "id": call.get("id") or f"c{i:04}{j:04}"} if isinstance(call, dict) else call


def _tool_name(call: dict[str, Any]) -> str:
    function = call.get("function")
    return str(function.get("name")) if isinstance(function, dict) else ""


class EmbedRequest(RequestFields):
    """Body of ``/api/embed``."""

    input: Annotated[str | list[str], Field(description="a string or a list of strings")] = ""
    truncate: Boolean = True
    dimensions: Integer | None = None


class EmbeddingsRequest(RequestFields):
    """Body of ``/api/embeddings``, the older form of ``/api/embed``."""

    prompt: Text = ""

"""Wire models of OpenAI's completions and chat completions, and the fields that other endpoints share with them.

They hold the used fields only; ``fields.toml`` has the other names. Ranges are checked by `SamplingParams`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from quire.errors import RequestError, clip
from quire.http.wire import (
    INT64_MAX,
    AnyObject,
    Boolean,
    Int64,
    Integer,
    Number,
    Text,
    Texts,
    TokenIds,
    TypedObject,
    Wire,
    parse,
)

Tools = Annotated[list[Any], Field(description="a list of tools")]
TextContent = Annotated[str | list[Any], Field(description="a string or a list of text parts")]
AnySchema = Annotated[str | dict[str, Any], Field(description="a JSON schema: an object, or its text")]
DeadlineField = Annotated[
    float | dict[str, Any],
    Field(description="a number of milliseconds, or an object with first_token, total or both"),
]

EFFORTS = {"max": "xhigh"}  # the highest level that templates know


class StreamOptions(Wire):
    """``stream_options``."""

    include_usage: Boolean = False
    continuous_usage_stats: Boolean = False


class RequestFields(Wire):
    """Fields of every request to the engine. None: not given."""

    model: Text | None = None
    priority: Int64 = 0
    cache_salt: Text = ""
    request_id: Text | None = None


class SampledFields(RequestFields):
    """Fields that every endpoint which samples tokens has under the same name."""

    stream: Boolean = False
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    seed: Integer | None = None
    deadline_ms: DeadlineField | None = None
    timing: Boolean = False

    def given_sampling(self) -> dict[str, Any]:
        """Return the sampling fields among these that the client set."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class GenerationFields(SampledFields):
    """Fields of chat and text completions."""

    stream_options: AnyObject | None = None
    n: Integer | None = None
    typical_p: Number | None = None
    best_of: Integer | None = None
    use_beam_search: Boolean | None = None
    length_penalty: Number | None = None
    early_stopping: Annotated[bool | Literal["never"] | None, Field(description="true, false or 'never'")] = (
        None
    )
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[
        dict[str, float] | None, Field(description="an object of token ids to numbers in -100…100")
    ] = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    stop: Annotated[str | list[str] | None, Field(description="a string or a list of strings")] = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: Boolean | None = None
    ignore_eos: Boolean | None = None
    bad_words: Texts | None = None
    allowed_token_ids: TokenIds | None = None
    skip_special_tokens: Boolean | None = None
    response_format: TypedObject | None = None
    structured_outputs: AnyObject | None = None
    guided_json: AnySchema | None = None
    guided_regex: Text | None = None
    guided_choice: Texts | None = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = None
    structural_tag: Annotated[str | dict[str, Any] | None, Field(description="an object, or its text")] = None
    json_schema: AnySchema | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    user: Text = ""
    rid: Text | None = None
    return_token_ids: Boolean = False
    return_tokens_as_token_ids: Boolean = False
    truncate_prompt_tokens: Integer | None = None
    prompt_logprobs: Integer | None = None


class CompletionRequest(GenerationFields):
    """Body of ``/v1/completions``. ``prompt`` is checked by `parse_prompts`."""

    prompt: Any = None
    logprobs: Integer | None = None
    add_special_tokens: Boolean = True
    echo: Boolean = False


class ChatPrompt(Wire):
    """What a chat template renders. ``messages`` are checked by `template_messages`."""

    messages: Annotated[list[Any], Field(description="a list of at least one message", min_length=1)]
    add_generation_prompt: Boolean | None = None
    continue_final_message: Boolean | None = None
    chat_template_kwargs: AnyObject | None = None
    documents: Annotated[list[dict[str, Any]] | None, Field(description="a list of objects")] = None
    tools: Tools | None = None


class ChatRequest(GenerationFields, ChatPrompt):
    """Body of ``/v1/chat/completions``."""

    tool_choice: Any = None
    parallel_tool_calls: Boolean | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    thinking_token_budget: Annotated[
        int | None, Strict(), Field(description=f"an integer ≥ 0, at most {INT64_MAX}", ge=0, le=INT64_MAX)
    ] = None
    include_reasoning: Boolean = True
    separate_reasoning: Boolean = True
    logprobs: Boolean = False
    top_logprobs: Integer | None = None
    max_completion_tokens: Integer | None = None


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


def stream_options(request: GenerationFields, ignored: list[str] | None = None) -> StreamOptions | None:
    """Return the checked ``stream_options``, or None when the answer is not streamed."""
    if request.stream_options is None:
        return StreamOptions() if request.stream else None
    if not request.stream:
        raise RequestError(
            "stream_options is only allowed with stream = true.", param="stream_options", code="invalid_value"
        )
    return parse(StreamOptions, request.stream_options, prefix="stream_options.", ignored=ignored)


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

"""Wire requests: the only pydantic in Quire. Types are strict ("5" is not 5); ranges are `SamplingParams`'.

The models hold used fields only: `fields.sift` has refused the others and dropped nulls, so an absent field and a null
one are the same. Each field's description is what an error message says is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from quire.api import field_tables
from quire.api.fields import Table, clip, sift
from quire.errors import RequestError

Number = Annotated[float, Strict(), Field(description="a number")]
Integer = Annotated[int, Strict(), Field(description="an integer")]
Boolean = Annotated[bool, Strict(), Field(description="true or false")]
Text = Annotated[str, Strict(), Field(description="a string")]
TokenIds = Annotated[list[Annotated[int, Strict()]], Field(description="a list of token ids (integers)")]

AnySchema = Annotated[str | dict[str, Any], Field(description="a JSON schema: an object, or its text")]


DeadlineField = Annotated[
    float | dict[str, Any],
    Field(description="a number of milliseconds, or an object with first_token, total or both"),
]


class Wire(BaseModel):
    """Base of the wire models: frozen, strict, no name beyond the declared ones."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())


class StreamOptions(Wire):
    """``stream_options``: whether and when the stream carries a usage block."""

    include_usage: Boolean = False
    continuous_usage_stats: Boolean = False


class GenerationFields(Wire):
    """What chat and text completions have in common. None: not given."""

    model: Text | None = None
    stream: Boolean = False
    stream_options: Annotated[dict[str, Any] | None, Field(description="an object")] = None
    n: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    best_of: Integer | None = None
    use_beam_search: Boolean | None = None
    length_penalty: Number | None = None
    early_stopping: Annotated[bool | Literal["never"] | None, Field(description="true, false or 'never'")] = (
        None
    )
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: Annotated[
        dict[str, float] | None, Field(description="an object of token ids to numbers in -100…100")
    ] = None
    seed: Integer | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    stop: Annotated[str | list[str] | None, Field(description="a string or a list of strings")] = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: Boolean | None = None
    ignore_eos: Boolean | None = None
    bad_words: Annotated[list[str] | None, Field(description="a list of strings")] = None
    allowed_token_ids: TokenIds | None = None
    skip_special_tokens: Boolean | None = None
    response_format: Annotated[dict[str, Any] | None, Field(description="an object with a type")] = None
    structured_outputs: Annotated[dict[str, Any] | None, Field(description="an object")] = None
    guided_json: AnySchema | None = None
    guided_regex: Text | None = None
    guided_choice: Annotated[list[str] | None, Field(description="a list of strings")] = None
    guided_grammar: Text | None = None
    guided_whitespace_pattern: Text | None = None
    structural_tag: Annotated[str | dict[str, Any] | None, Field(description="an object, or its text")] = None
    json_schema: AnySchema | None = None
    regex: Text | None = None
    ebnf: Text | None = None
    priority: Integer = 0
    cache_salt: Text = ""
    user: Text = ""
    request_id: Text | None = None
    rid: Text | None = None
    return_token_ids: Boolean = False
    return_tokens_as_token_ids: Boolean = False
    truncate_prompt_tokens: Integer | None = None
    deadline_ms: DeadlineField | None = None
    timing: Boolean = False
    prompt_logprobs: Integer | None = None


class CompletionRequest(GenerationFields):
    """Body of ``/v1/completions``. ``prompt`` is checked by `quire.api.completions`."""

    prompt: Any = None
    logprobs: Integer | None = None
    add_special_tokens: Boolean = True
    echo: Boolean = False


class ChatPrompt(Wire):
    """What a chat template renders. ``messages`` are checked by `quire.api.messages`."""

    messages: Annotated[list[Any], Field(description="a list of at least one message", min_length=1)]
    add_generation_prompt: Boolean | None = None
    continue_final_message: Boolean | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="an object")] = None
    documents: Annotated[list[dict[str, Any]] | None, Field(description="a list of objects")] = None
    tools: Annotated[list[Any] | None, Field(description="a list of tools")] = None


class ChatRequest(GenerationFields, ChatPrompt):
    """Body of ``/v1/chat/completions``."""

    tool_choice: Any = None
    parallel_tool_calls: Boolean | None = None
    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None,
        Field(description="'none', 'minimal', 'low', 'medium', 'high' or 'xhigh'"),
    ] = None
    thinking_token_budget: Annotated[int | None, Strict(), Field(description="an integer ≥ 0", ge=0)] = None
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
    type: Annotated[Literal["function"], Field(description="'function'")] = "function"
    function: Annotated[FunctionCall, Field(description="an object with a name and arguments")]


class Message(Wire):
    """One message of a conversation. ``content`` is checked by `quire.api.messages`."""

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        Field(description="'system', 'developer', 'user', 'assistant' or 'tool'"),
    ]
    content: Any = None
    name: Text | None = None
    tool_calls: Annotated[list[ToolCall] | None, Field(description="a list of tool calls")] = None
    tool_call_id: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    thinking: Text | None = None


Model = TypeVar("Model", bound=Wire)


def parse(
    model: type[Model], body: Any, table: Table, *, prefix: str = "", ignored: list[str] | None = None
) -> Model:
    """Return the wire value of ``body``. A list ``ignored`` lets unknown names pass and collects their paths.

    Raises:
        RequestError: a name that is unknown or refused, or a value of the wrong type; ``param`` is its path.
    """
    if not isinstance(body, dict):
        what = f"{prefix.rstrip('.')} = {clip(body)}" if prefix else f"The body {clip(body)}"
        raise RequestError(f"{what} is not allowed: it must be an object.", param=prefix.rstrip(".") or None)
    kept = sift(body, table, prefix=prefix, ignored=ignored)
    try:
        return model.model_validate(kept)
    except ValidationError as error:
        raise _type_error(model, error, body, prefix) from None


def stream_options(request: GenerationFields, ignored: list[str] | None = None) -> StreamOptions | None:
    """Return the checked ``stream_options``, or None when the answer is not streamed."""
    if request.stream_options is None:
        return StreamOptions() if request.stream else None
    if not request.stream:
        raise RequestError(
            "stream_options is only allowed with stream = true.", param="stream_options", code="invalid_value"
        )
    table = field_tables.STREAM_OPTIONS
    return parse(StreamOptions, request.stream_options, table, prefix="stream_options.", ignored=ignored)


def _type_error(
    model: type[Wire], error: ValidationError, body: Mapping[str, Any], prefix: str
) -> RequestError:
    """Name the first wrong field, its value and what is allowed. Union branches in the path are left out."""
    first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0])
    field = next(f for own, f in model.model_fields.items() if name in (own, f.alias))
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return RequestError(
            f"{prefix}{name} is required: it must be {_allowed(field)}.",
            param=prefix + name,
            code="missing_required_parameter",
        )
    where = prefix + name
    if name == "tool_calls" and len(first["loc"]) > 1:
        where += "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"][1:])
        message = f"{where} = {clip(first['input'])} is not allowed: {first['msg'].lower()}."
    else:
        message = f"{where} = {clip(body.get(name))} is not allowed: it must be {_allowed(field)}."
    return RequestError(message, param=where, code="invalid_type")


def _allowed(field: Any) -> str:
    """The field's description; for ``Annotated`` inside a union pydantic keeps it on the member."""
    if field.description:
        return str(field.description)
    for member in getattr(field.annotation, "__args__", ()):
        for note in getattr(member, "__metadata__", ()):
            if getattr(note, "description", None):
                return str(note.description)
    return "of another type"

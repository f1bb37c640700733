"""Wire models of OpenAI's completions, the fields that other endpoints share with them, and their `SamplingParams`.

They hold the used fields only; ``fields.toml`` has the other names. Ranges are checked by `SamplingParams`. The form of
an answer (``response_format``, ``structured_outputs`` and its aliases) and deadlines are checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict

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
    User,
    Wire,
    not_allowed,
    parse,
    whole,
)
from quire.request import TOKEN_ID_MAX, Deadline, SamplingParams
from quire.structured_outputs import StructuredOutputsParams

Tools = Annotated[list[Any], Field(description="a list of tools")]
TextContent = Annotated[str | list[Any], Field(description="a string or a list of text parts")]
AnySchema = Annotated[str | dict[str, Any], Field(description="a JSON schema: an object, or its text")]
DeadlineField = Annotated[
    float | dict[str, Any],
    Field(description="a number of milliseconds, or an object with first_token, total or both"),
]

REST_OF_CONTEXT = -1  # llama.cpp's and Ollama's max_tokens for "no limit"
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
    repeat_last_n: Integer | None = None
    seed: Integer | None = None
    deadline_ms: DeadlineField | None = None
    timing: Boolean = False


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
    user: User = ""
    rid: Text | None = None
    return_token_ids: Boolean = False
    return_tokens_as_token_ids: Boolean = False
    truncate_prompt_tokens: Integer | None = None
    prompt_logprobs: Integer | None = None


# The fields that say what form the answer has.
FORM_FIELDS = frozenset(
    {
        "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "guided_whitespace_pattern", "structural_tag", "json_schema", "regex", "ebnf",
    }
)  # fmt: skip
# The fields that change what a chat template is given beside the messages.
TEMPLATE_FIELDS = frozenset(
    {
        "chat_template_kwargs", "reasoning_effort", "documents", "continue_final_message",
        "add_generation_prompt",
    }
)  # fmt: skip


class CompletionRequest(GenerationFields):
    """Body of ``/v1/completions``. ``prompt`` is checked by `parse_prompts`."""

    prompt: Any = None
    suffix: Text = ""
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
        int | None,
        Strict(),
        Field(description=f"an integer ≥ 0, at most {INT64_MAX}", ge=0, le=INT64_MAX),
        BeforeValidator(whole),
    ] = None
    include_reasoning: Boolean = True
    separate_reasoning: Boolean = True
    logprobs: Annotated[bool | int, Field(description="true or false"), BeforeValidator(whole)] = False
    top_logprobs: Integer | None = None
    max_completion_tokens: Integer | None = None


def stream_options(request: GenerationFields, ignored: list[str] | None = None) -> StreamOptions | None:
    """Return the checked ``stream_options``, or None when the answer is not streamed."""
    if request.stream_options is None:
        return StreamOptions() if request.stream else None
    if not request.stream and not any(request.stream_options.values()):  # nothing is asked for
        return None
    if not request.stream:
        raise RequestError(
            "stream_options is only allowed with stream = true.", param="stream_options", code="invalid_value"
        )
    return parse(StreamOptions, request.stream_options, prefix="stream_options.", ignored=ignored)


# Fields of `SamplingParams` that a request has too, with the same meaning.
_OTHER_MEANING = {"logit_bias", "logprobs", "max_tokens", "structured_outputs"}
_SAME_NAME = tuple(
    each.name
    for each in fields(SamplingParams)
    if each.name in GenerationFields.model_fields and each.name not in _OTHER_MEANING
)
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000


class DeadlineMs(Wire):
    """``deadline_ms`` as an object; milliseconds from the arrival of the request."""

    first_token: Number | None = None
    total: Number | None = None


def given_sampling(request: SampledFields) -> dict[str, Any]:
    """Return the sampling fields that a request sets.

    Raises:
        RequestError: best_of in a stream, or a logit_bias whose keys are not token ids.
    """
    given: dict[str, Any] = {}
    for name in _SAME_NAME:
        if (value := getattr(request, name, None)) is not None:
            given[name] = value
    if isinstance(given.get("stop"), str | list):  # an empty string stops nothing
        stop = given["stop"]
        given["stop"] = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
    best_of = given.get("best_of")
    if (
        best_of is not None
        and not given.get("use_beam_search")
        and request.stream
        and best_of > (given.get("n") or 1)
    ):
        raise RequestError(
            f"best_of = {clip(best_of)} is not allowed with stream = true: the best "
            "answers are known at the end.",
            param="best_of",
        )
    if isinstance(request, GenerationFields) and request.logit_bias is not None:
        given["logit_bias"] = _logit_bias(request.logit_bias)
    return given


def sampling_params(
    given: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None = None,
    form: StructuredOutputsParams | None = None,
    client_names: Mapping[str, str] | None = None,
) -> SamplingParams:
    """Return `SamplingParams` of the ``given`` fields, else of the model's ``defaults``, else of their own defaults.

    ``max_tokens`` None means the rest of the context. ``client_names``: the client's name of fields that have another.

    Raises:
        RequestError: a value out of range, under the client's name.
    """
    if given.get("use_beam_search"):
        defaults = {}  # beams are not sampled, so defaults for sampling would contradict them
    for field, value in defaults.items():
        if field in _SAME_NAME:
            given = {field: value, **given}
    try:
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=logprobs, structured_outputs=form)
    except RequestError as error:
        name = (client_names or {}).get(error.param or "")
        if name is None:
            raise
        message = str(error).replace(str(error.param), name, 1)
        raise RequestError(message, param=name, code=error.code) from None


def output_limit(max_tokens: int | None) -> int | None:
    """Return ``max_tokens`` with None for the rest of the context."""
    return None if max_tokens == REST_OF_CONTEXT else max_tokens


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key.lstrip("0")) <= len(str(TOKEN_ID_MAX))):
            raise RequestError(
                f"logit_bias has the key {clip(key)}: keys must be token ids (integers in 0…{TOKEN_ID_MAX}) as "
                "strings.",
                param="logit_bias",
            )
    return {int(key): value for key, value in bias.items()}


def deadline_of(given: Any, ignored: list[str] | None) -> Deadline | None:
    """Return the limits of ``deadline_ms``: a number (the total) or an object.

    Raises:
        RequestError: a limit out of range, or a first token that may come later than the end.
    """
    if given is None:
        return None
    if isinstance(given, dict):
        limits = parse(DeadlineMs, given, prefix="deadline_ms.", ignored=ignored)
    else:
        limits = DeadlineMs(total=given)
    for name, value in (("first_token", limits.first_token), ("total", limits.total)):
        if value is not None and not 0 < value <= MAX_DEADLINE_MS:
            where = f"deadline_ms.{name}" if isinstance(given, dict) else "deadline_ms"
            raise not_allowed(where, value, f"a number of milliseconds in (0, {MAX_DEADLINE_MS}]")
    first, total = limits.first_token, limits.total
    if first is None and total is None:
        raise RequestError(
            "deadline_ms is empty: it must have first_token, total or both.", param="deadline_ms"
        )
    if first is not None and total is not None and first > total:
        raise RequestError(
            f"deadline_ms.first_token = {first:g} is more than deadline_ms.total = {total:g}.",
            param="deadline_ms.first_token",
        )
    return Deadline(None if first is None else first / 1e3, None if total is None else total / 1e3)

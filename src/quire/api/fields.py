"""Wire fields that several dialects share, and the checks of those that need more than a type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from quire.errors import RequestError, clip
from quire.http.wire import (
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
)
from quire.request import TOKEN_ID_MAX, Deadline

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


MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000


class DeadlineMs(Wire):
    """``deadline_ms`` as an object; milliseconds from the arrival of the request."""

    first_token: Number | None = None
    total: Number | None = None


def read_deadline(value_ms: Any, ignored: list[str] | None) -> Deadline | None:
    """Return the limits of ``deadline_ms``: a number (the total) or an object.

    Raises:
        RequestError: a limit out of range, or a first token that may come later than the end.
    """
    if value_ms is None:
        return None
    if isinstance(value_ms, dict):
        limits = parse(DeadlineMs, value_ms, prefix="deadline_ms.", ignored=ignored)
    else:
        limits = DeadlineMs(total=value_ms)
    for name, value in (("first_token", limits.first_token), ("total", limits.total)):
        if value is not None and not 0 < value <= MAX_DEADLINE_MS:
            where = f"deadline_ms.{name}" if isinstance(value_ms, dict) else "deadline_ms"
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


def read_logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key.lstrip("0")) <= len(str(TOKEN_ID_MAX))):
            raise RequestError(
                f"logit_bias has the key {clip(key)}: keys must be token ids (integers in 0…{TOKEN_ID_MAX}) as "
                "strings.",
                param="logit_bias",
            )
    return {int(key): value for key, value in bias.items()}

"""Wire models of Anthropic's Messages API, in the manner of `protocol`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from quire.api.protocol import Boolean, DeadlineField, Integer, Number, Text, Wire

AnyObject = Annotated[dict[str, Any], Field(description="an object")]
Content = Annotated[str | list[Any], Field(description="a string or a list of content blocks")]


class PromptFields(Wire):
    """What a message and a token count are asked with."""

    model: Text | None = None
    messages: Annotated[list[Any], Field(description="a list of at least one message", min_length=1)]
    system: Annotated[str | list[Any] | None, Field(description="a string or a list of text blocks")] = None
    tools: Annotated[list[Any] | None, Field(description="a list of tools")] = None
    tool_choice: Annotated[dict[str, Any] | None, Field(description="an object with a type")] = None
    thinking: Annotated[dict[str, Any] | None, Field(description="an object with a type")] = None
    output_config: Annotated[dict[str, Any] | None, Field(description="an object")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Field(description="an object")] = None


class CountTokensRequest(PromptFields):
    """Body of ``/v1/messages/count_tokens``."""


class MessagesRequest(PromptFields):
    """Body of ``/v1/messages``."""

    max_tokens: Annotated[int, Field(description="an integer ≥ 1", ge=1)]
    stop_sequences: Annotated[list[str] | None, Field(description="a list of strings")] = None
    stream: Boolean = False
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    metadata: Annotated[dict[str, Any] | None, Field(description="an object")] = None
    seed: Integer | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    priority: Integer = 0
    cache_salt: Text = ""
    request_id: Text | None = None
    deadline_ms: DeadlineField | None = None
    timing: Boolean = False


class Metadata(Wire):
    """``metadata``."""

    user_id: Text = ""


class Turn(Wire):
    """One of ``messages``."""

    role: Annotated[
        Literal["user", "assistant", "system"], Field(description="'user', 'assistant' or 'system'")
    ]
    content: Content


class TextBlock(Wire):
    """A block of text."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(Wire):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: Text


class ToolUseBlock(Wire):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: AnyObject


class ToolResultBlock(Wire):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Content = ""


class Thinking(Wire):
    """``thinking``."""

    type: Annotated[
        Literal["enabled", "disabled", "adaptive"],
        Field(description="'enabled', 'disabled' or 'adaptive'"),
    ]
    budget_tokens: Annotated[int | None, Strict(), Field(description="an integer ≥ 1", ge=1)] = None
    display: Annotated[
        Literal["summarized", "omitted"] | None, Field(description="'summarized' or 'omitted'")
    ] = None


class OutputConfig(Wire):
    """``output_config``."""

    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None,
        Field(description="'low', 'medium', 'high', 'xhigh' or 'max'"),
    ] = None
    format: AnyObject | None = None


class OutputConfigFormat(Wire):
    """``output_config.format``."""

    type: Annotated[Literal["json_schema"], Field(description="'json_schema'")]
    schema_: Annotated[dict[str, Any], Field(alias="schema", description="a JSON schema (an object)")]


class ToolChoice(Wire):
    """``tool_choice``."""

    type: Annotated[
        Literal["auto", "any", "tool", "none"], Field(description="'auto', 'any', 'tool' or 'none'")
    ]
    name: Text | None = None
    disable_parallel_tool_use: Boolean = False


class Tool(Wire):
    """One of ``tools``."""

    type: Annotated[
        Literal["custom"], Field(description="'custom': tools of Anthropic's servers are not here")
    ] = "custom"
    name: Text
    description: Text | None = None
    input_schema: Annotated[dict[str, Any], Field(description="a JSON schema (an object)")]
    strict: Boolean | None = None

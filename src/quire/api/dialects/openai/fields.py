"""Wire models of OpenAI's completions. They hold the used fields only; ``fields.toml`` has the other names."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Strict

from quire.api.fields import GenerationFields, Tools
from quire.http.wire import INT64_MAX, AnyObject, Boolean, Integer, Text, Wire, as_integer

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
        BeforeValidator(as_integer),
    ] = None
    include_reasoning: Boolean = True
    separate_reasoning: Boolean = True
    logprobs: Annotated[bool | int, Field(description="true or false"), BeforeValidator(as_integer)] = False
    top_logprobs: Integer | None = None
    max_completion_tokens: Integer | None = None

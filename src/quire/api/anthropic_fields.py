"""Every field of Anthropic's Messages API, classified as `field_tables` does for OpenAI's."""

from __future__ import annotations

from quire.api.field_tables import VLLM_CHAT
from quire.api.fields import Rule, no_effect, refused, used

_TEXT_ONLY = "The model reads and writes text only."

# What a request and a token count have in common.
_PROMPT: dict[str, Rule] = {
    **used("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config"),
    **no_effect(
        "cache_control",  # the prefix cache finds equal prefixes by their content
        "betas",
        "diagnostics",
        "inference_geo",
        "user_profile_id",
        "workspace_id",
    ),
    **refused("mcp_servers", neutral=([],), hint="Send tools."),
    **refused("context_management", hint="Shorten the conversation yourself."),
    **refused("container", hint="There are no containers."),
    **refused("speed", neutral=("standard",)),
    **refused("output_format", hint="Send output_config.format."),
    # Beside Anthropic's fields: what a template may read.
    "chat_template_kwargs": VLLM_CHAT["chat_template_kwargs"],
}

MESSAGES: dict[str, Rule] = {
    **_PROMPT,
    **used("max_tokens", "stop_sequences", "stream", "temperature", "top_p", "top_k", "metadata"),
    **no_effect("service_tier"),
    # Beside Anthropic's fields, under the names of the other endpoints.
    **used("seed", "min_p", "repetition_penalty", "priority", "cache_salt", "request_id"),
    **used("deadline_ms", "timing"),
}
COUNT_TOKENS: dict[str, Rule] = _PROMPT

METADATA: dict[str, Rule] = used("user_id")  # names the tenant, as `user` does elsewhere
TURN: dict[str, Rule] = used("role", "content")
THINKING: dict[str, Rule] = used("type", "display", "budget_tokens")
OUTPUT_CONFIG: dict[str, Rule] = {**used("effort", "format"), **refused("task_budget")}
OUTPUT_CONFIG_FORMAT: dict[str, Rule] = used("type", "schema")
TOOL_CHOICE: dict[str, Rule] = used("type", "name", "disable_parallel_tool_use")
TOOL: dict[str, Rule] = {
    **used("type", "name", "description", "input_schema", "strict"),
    **no_effect("cache_control", "eager_input_streaming"),
    **refused("input_examples", neutral=([],), hint="Write the examples into description."),
    **refused("defer_loading", neutral=(False,), hint="There is no tool search."),
    **refused("allowed_callers", neutral=(["direct"],), hint="There is no code execution."),
}

# Content blocks by their type.
TEXT_BLOCK: dict[str, Rule] = {
    **used("type", "text"),
    **no_effect("cache_control"),
    **refused("citations", neutral=([],), hint="There are no citations."),
}
THINKING_BLOCK: dict[str, Rule] = {**used("type", "thinking"), **no_effect("signature", "cache_control")}
TOOL_USE_BLOCK: dict[str, Rule] = {
    **used("type", "id", "name", "input"),
    **no_effect("cache_control"),
    **refused("caller", neutral=({"type": "direct"},)),
    **refused("toolset_name"),
}
TOOL_RESULT_BLOCK: dict[str, Rule] = {
    **used("type", "tool_use_id", "content"),
    **no_effect("cache_control", "is_error"),  # chat templates know no failed result: the content says it
    **refused("toolset_name"),
}

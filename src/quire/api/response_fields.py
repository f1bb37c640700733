"""Every field of OpenAI's Responses API, classified as `field_tables` does for the others."""

from __future__ import annotations

from quire.api.field_tables import VLLM_CHAT
from quire.api.fields import Rule, no_effect, refused, used

_TEXT_ONLY = "The model reads and writes text only."

RESPONSES: dict[str, Rule] = {
    **used("model", "input", "instructions", "previous_response_id", "store", "metadata", "stream"),
    **used("tools", "tool_choice", "parallel_tool_calls", "text", "reasoning"),
    **used("max_output_tokens", "temperature", "top_p", "user"),
    **no_effect(
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",  # the prefix cache finds equal prefixes by their content
        "prompt_cache_retention",
        "prompt_cache_options",
        "stream_options",  # its one field pads events against side channels
        "max_tool_calls",  # counts calls of built-in tools, of which there are none
    ),
    **used("background", "include", "top_logprobs"),
    **refused("truncation", neutral=("disabled",), hint="Shorten the input yourself."),
    **refused("conversation", hint="Send previous_response_id."),
    **refused("prompt", hint="There are no stored prompts."),
    **refused("context_management", hint="Shorten the input yourself."),
    **refused("moderation", hint="There is no moderation."),
    # Beside OpenAI's fields, under the names of the other endpoints.
    **used("top_k", "min_p", "repetition_penalty", "seed", "priority", "cache_salt", "request_id"),
    **used("deadline_ms", "timing"),
    "chat_template_kwargs": VLLM_CHAT["chat_template_kwargs"],
}

REASONING: dict[str, Rule] = {
    **used("effort"),
    **no_effect("summary", "generate_summary"),  # the reasoning itself is in the answer
    **refused("mode", "context", neutral=("auto",)),
}
TEXT: dict[str, Rule] = {
    **used("format"),
    **refused("verbosity", neutral=("medium",), hint="Ask for the length you want in the input."),
}
TEXT_FORMAT: dict[str, Rule] = {**used("type", "name", "schema", "strict"), **no_effect("description")}
TOOL: dict[str, Rule] = {
    **used("type", "name", "description", "parameters", "strict"),
    **no_effect("output_schema"),  # of what the client's function returns
    **refused("defer_loading", neutral=(False,), hint="There is no tool search."),
    **refused("allowed_callers", neutral=(["direct"],), hint="There is no code execution."),
}
TOOL_CHOICE: dict[str, Rule] = used("type", "name")

# Items of ``input`` by their type, and the parts of their contents.
MESSAGE_ITEM: dict[str, Rule] = {**used("type", "role", "content"), **no_effect("id", "status", "phase")}
CALL_ITEM: dict[str, Rule] = {
    **used("type", "call_id", "name", "arguments"),
    **no_effect("id", "status"),
    **refused("caller", neutral=({"type": "direct"},)),
    **refused("namespace", "async"),
}
OUTPUT_ITEM: dict[str, Rule] = {
    **used("type", "call_id", "output"),
    **no_effect("id", "status", "name"),
    **refused("caller", neutral=({"type": "direct"},)),
    **refused("namespace"),
}
REASONING_ITEM: dict[str, Rule] = {
    **used("type", "summary", "content"),
    **no_effect("id", "status"),
    **refused("encrypted_content", hint="Send content."),
}
PART: dict[str, Rule] = {
    **used("type", "text"),
    **no_effect("annotations", "logprobs", "prompt_cache_breakpoint"),
}

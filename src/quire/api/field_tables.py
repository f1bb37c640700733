"""Every property of OpenAI's create-requests and the extensions of vLLM, SGLang and Anthropic, classified.

A test reads OpenAI's OpenAPI file and fails on a property that is missing here. ``neutral`` values are those that ask
for what happens anyway. Null is always accepted.
"""

from __future__ import annotations

from quire.api.fields import Rule, no_effect, refused, used

_TEXT_ONLY = "The model reads and writes text only."
_STORED_TEMPLATE = "Start the server with --chat-template to use another template."
_NATIVE_WEIGHTS = "name a loaded LoRA adapter as the model."


_OPENAI_SAMPLING = used(
    "model",
    "temperature",
    "top_p",
    "n",
    "stream",
    "stream_options",
    "stop",
    "max_tokens",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "seed",
    "user",
)

OPENAI_CHAT: dict[str, Rule] = {
    **_OPENAI_SAMPLING,
    **used("messages", "max_completion_tokens", "top_logprobs", "reasoning_effort"),
    **used("tools", "tool_choice", "parallel_tool_calls"),
    **no_effect(
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",  # the prefix cache finds equal prefixes by their content
        "prompt_cache_retention",
        "prompt_cache_options",
        "prediction",  # speeds decoding up, never changes the answer
    ),
    **refused("modalities", neutral=(["text"],), hint=_TEXT_ONLY),
    **refused("audio", hint=_TEXT_ONLY),
    **refused("verbosity", neutral=("medium",), hint="Ask for the length you want in a message."),
    **refused("web_search_options", hint="There is no web search."),
    **refused("moderation", hint="There is no moderation."),
    **used("response_format"),
    **refused("functions", neutral=([],), hint="Send tools."),
    **refused("function_call", neutral=("none", "auto"), hint="Send tool_choice."),
}

OPENAI_COMPLETIONS: dict[str, Rule] = {
    **_OPENAI_SAMPLING,
    **used("prompt"),
    **used("best_of"),
    **used("echo"),
    **refused("suffix", neutral=("",), hint="Write the model's fill-in-the-middle tokens into the prompt."),
}

# What both servers add to OpenAI's sampling, in vLLM's names.
_EXTENDED_SAMPLING = used(
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
    "priority",
    "cache_salt",
    "request_id",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "truncate_prompt_tokens",
)

VLLM: dict[str, Rule] = {
    **_EXTENDED_SAMPLING,
    **used("best_of", "use_beam_search", "early_stopping", "length_penalty"),
    **used("prompt_logprobs"),
    **refused("logprob_token_ids", hint="Ask for top_logprobs."),
    **refused("spaces_between_special_tokens", neutral=(True,)),
    **used("structured_outputs", "structural_tag", "guided_whitespace_pattern"),
    **used("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    **no_effect("guided_decoding_backend"),  # names how, not what, to constrain
    **refused("logits_processors", neutral=([],), hint="Use logit_bias, bad_words or allowed_token_ids."),
    **refused("mm_processor_kwargs", "media_io_kwargs", neutral=({},), hint=_TEXT_ONLY),
    **refused("kv_transfer_params", "vllm_xargs", neutral=({},)),
    **refused("repetition_detection"),
    **used("response_format"),
}

VLLM_CHAT: dict[str, Rule] = {
    **used("include_reasoning", "thinking_token_budget"),
    **used("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents"),
    **refused("add_special_tokens", neutral=(False,), hint="The chat template writes the special tokens."),
    **refused("echo", neutral=(False,), hint="Put the message before the answer yourself."),
    **refused("chat_template", hint=_STORED_TEMPLATE),
}

VLLM_COMPLETIONS: dict[str, Rule] = {
    **used("add_special_tokens"),
    **refused("thinking_token_budget", hint="Send a chat completion."),
    **refused("prompt_embeds", hint="Send the prompt as text or token ids."),
}

SGLANG: dict[str, Rule] = {
    **_EXTENDED_SAMPLING,
    **used("rid"),
    **used("regex", "ebnf", "json_schema"),
    **refused("stop_regex", neutral=([],), hint="Use stop."),
    **refused("no_stop_trim", neutral=(False,), hint="Use include_stop_str_in_output."),
    **refused("lora_path", hint=_NATIVE_WEIGHTS),
    **refused("session_params", "custom_logit_processor", "custom_params"),
    **refused("extra_key", hint="Use cache_salt."),
    **refused("bootstrap_host", "bootstrap_port", "bootstrap_room"),
    **no_effect("data_parallel_rank"),
    **refused("return_hidden_states", "return_routed_experts", neutral=(False,)),
    **refused("return_cached_tokens_details", neutral=(False,), hint="See usage.prompt_tokens_details."),
}

SGLANG_CHAT: dict[str, Rule] = {
    **used("separate_reasoning"),
    **refused("stream_reasoning", neutral=(True,), hint="Send include_reasoning = false to leave it out."),
    **refused("input_ids", hint="Send token ids to /v1/completions."),
    **refused("max_dynamic_patch", "min_dynamic_patch", hint=_TEXT_ONLY),
}

# Quire's own.
QUIRE: dict[str, Rule] = {
    **used("deadline_ms", "timing", "typical_p"),
}

# Names of Anthropic's Messages API that get sent to OpenAI's endpoints.
ANTHROPIC: dict[str, Rule] = {
    **used("top_k"),
    **no_effect("cache_control", "inference_geo", "betas"),
    **refused("system", hint="Send a message with the role 'system'."),
    **refused("stop_sequences", hint="Use stop."),
    **refused(
        "thinking", neutral=({"type": "disabled"},), hint="Send reasoning_effort or chat_template_kwargs."
    ),
    **refused("output_config", "output_format", hint="Use response_format."),
    **refused("mcp_servers", neutral=([],), hint="Send tools."),
    **refused("container", "context_management", "speed"),
}

# The endpoints' own tables. OpenAI's rule wins where a name is in several.
CHAT: dict[str, Rule] = {
    **ANTHROPIC, **QUIRE, **SGLANG, **SGLANG_CHAT, **VLLM, **VLLM_CHAT, **OPENAI_CHAT,
}  # fmt: skip
COMPLETIONS: dict[str, Rule] = {
    **ANTHROPIC, **QUIRE, **SGLANG, **VLLM, **VLLM_COMPLETIONS, **OPENAI_COMPLETIONS,
}  # fmt: skip

TOKENIZE: dict[str, Rule] = {
    **used("model", "prompt", "messages", "add_special_tokens", "return_token_strs"),
    **used("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "documents"),
    **used("tools"),
    **refused("chat_template", hint=_STORED_TEMPLATE),
    **refused("mm_processor_kwargs", neutral=({},), hint=_TEXT_ONLY),
}
TOOL: dict[str, Rule] = {**used("type", "function"), **no_effect("cache_control")}
FUNCTION: dict[str, Rule] = used("name", "description", "parameters", "strict", "return", "response")

DETOKENIZE: dict[str, Rule] = used("model", "tokens")

RESPONSE_FORMAT: dict[str, Rule] = used("type", "json_schema", "structures", "triggers", "format")

JSON_SCHEMA_FORMAT: dict[str, Rule] = {
    **used("name", "schema", "strict"),
    **no_effect("description"),  # OpenAI shows it to the model; here the messages are all that the model sees
}

STRUCTURED_OUTPUTS: dict[str, Rule] = {
    **used("json", "regex", "choice", "grammar", "json_object", "structural_tag", "whitespace_pattern"),
    **used("disable_any_whitespace", "disable_additional_properties"),
    **no_effect("disable_fallback"),  # there is one backend
}

DEADLINE_MS: dict[str, Rule] = used("first_token", "total")

STREAM_OPTIONS: dict[str, Rule] = {
    **used("include_usage", "continuous_usage_stats"),
    **no_effect("include_obfuscation"),  # padding against side channels; it carries no content
}

MESSAGE: dict[str, Rule] = {
    **used("role", "content", "name", "tool_calls", "tool_call_id"),
    **used("reasoning_content", "reasoning", "thinking"),  # templates of reasoning models read them
    **no_effect("annotations", "cache_control", "id", "status"),
    **refused("refusal", hint="Send it as content."),
    **refused("audio", hint=_TEXT_ONLY),
    **refused("function_call", hint="Use tool_calls."),
    **refused("prefix", neutral=(False,), hint="Use continue_final_message."),
}

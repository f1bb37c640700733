"""The fields of ``/v1/embeddings``, ``/v1/rerank`` and ``/v1/score``: OpenAI's, Jina's, Cohere's and vLLM's."""

from __future__ import annotations

from quire.api.fields import Rule, no_effect, refused, used

_TEXT_ONLY = "The model reads text only."

_COMMON: dict[str, Rule] = {
    **used("model", "user", "priority", "cache_salt", "request_id"),
    **refused("mm_processor_kwargs", "media_io_kwargs", neutral=({},), hint=_TEXT_ONLY),
    **refused("chat_template", hint="The prompts of scores are those of docs/api.md."),
}

EMBEDDINGS: dict[str, Rule] = {
    **_COMMON,
    **used("input", "encoding_format", "dimensions", "truncate_prompt_tokens", "add_special_tokens"),
    **used("pooling", "normalize"),
    **refused(
        "messages", hint="Send input: the text that the chat template makes (/v1/chat/completions/render)."
    ),
    **refused("embed_dtype", neutral=("float32",), hint="Vectors are float32."),
    **refused("endianness", neutral=("little", "native"), hint="base64 is of little-endian float32."),
    **refused("truncation_side", neutral=("left",), hint="truncate_prompt_tokens keeps the end."),
    **refused("use_activation", hint="Send normalize."),
    **refused("chat_template", hint="Send input as text or token ids."),
    # Of embedding services: they choose an adapter or a prompt by them.
    **refused("task", "input_type", "prompt_name", hint="Write the instruction into input."),
}

_SCORES: dict[str, Rule] = {
    **_COMMON,
    **used("scoring", "instruction", "max_tokens_per_doc"),
    **refused("truncate_prompt_tokens", hint="Send max_tokens_per_doc."),
    **refused("use_activation", neutral=(True,), hint="Scores lie in 0…1."),
}

RERANK: dict[str, Rule] = {
    **_SCORES,
    **used("query", "documents", "top_n", "return_documents"),
    **refused("rank_fields", hint="Send each document as one text."),
    **refused(
        "max_chunks_per_doc", "overlap_tokens", hint="Send max_tokens_per_doc, or cut the documents yourself."
    ),
}

SCORE: dict[str, Rule] = {
    **_SCORES,
    **used("text_1", "text_2"),
    **refused("data_1", "data_2", "queries", "items", hint="Send text_1 and text_2."),
}

DOCUMENT: dict[str, Rule] = {**used("text"), **no_effect("id", "title", "metadata")}

"""The HTTP API: OpenAI's endpoints, Anthropic's messages, and an admin surface.

The way of a request through this package, over the manners of `quire.http`::

    app             routes
    endpoint        bytes → JSON under limits → a `Job` → its answer; every error as an answer; disconnects
    protocol        names and types of a request's fields; the last use of pydantic
    chat, anthropic, responses → conversation    messages → prompt; completions, pooling have their own
    params, tools   sampling, form of the answer, tools, thinking → `SamplingParams`
    prompt_streams  the prompts of a `Job` on the frontend
    parts           the text of an answer → reasoning, text and calls, for every kind of conversation
    job, chat …     `OutputChunk`s → JSON, whole or as server-sent events
"""

"""The HTTP API: OpenAI's endpoints, Anthropic's messages, Ollama's API, and an admin surface.

The way of a request through this package, over the manners of `quire.http`::

    app             routes
    endpoint        bytes → JSON under limits → a `Job` → its answer; every error as an answer; disconnects
    protocol        names and types of a request's fields, the last use of pydantic → `SamplingParams`
    chat, anthropic, responses, ollama → conversation    messages, tools → prompt; completions, pooling have their own
    job             the prompts of a request on the frontend, counted
    parts           `OutputChunk`s → reasoning, text and calls, log-probabilities, choices: whole or as events
"""

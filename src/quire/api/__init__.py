"""The HTTP API: bytes from strangers in, OpenAI's shapes out.

One request's way through this package::

    app        routes, request ids, keys, draining           (raw ASGI, no middleware that copies streams)
    body       bytes → JSON object, under limits
    fields     every name known: used | no effect | refused; others are refused with the nearest name
    protocol   names → types (pydantic, strict); the last sight of pydantic
    chat, completions     wire request → prompts and `SamplingParams` → `Frontend.submit`
    generation runs the streams of one request, aborts them when the client goes
    replies, logprobs, sse     `OutputChunk`s → JSON, whole or as server-sent events
"""

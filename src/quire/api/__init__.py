"""The HTTP API: dialects of several servers and clients, and an admin surface.

The way of a request through this package, over the manners of `quire.http`::

    app             routes
    endpoint        bytes → JSON under limits → a `Job` → its answer; every error as an answer; disconnects
    call_stages     what wraps a request where it is on: resumption, what a gateway is told
    dialects        a folder each: a body → `Job`, chunks → bytes of the answer; `dialect` says what one is
    fields, job     fields that dialects share, the last use of pydantic → `SamplingParams`, `Job`
    conversation    messages, tools → prompt; `history` for messages that are not plain text
    generation      the prompts of a job on the frontend, counted, and the bytes of its answer
    output_plan, assembler   `OutputChunk`s → reasoning, text and calls, where a model writes them
"""

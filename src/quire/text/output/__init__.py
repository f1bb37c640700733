"""Splits what a model writes, while it is written, into content, reasoning and tool calls (docs/structured-output.md).

formats         how each family of models writes them: data
detect          chat template → format
generic         calls of a model whose template shows none: asked for in a message
parser          text in pieces → deltas
reader          the cursor over the text, for generators that wait for more
sections        calls written as JSON objects or as named JSON
tagged          calls written as tagged parameters or nested elements
literals        calls written as Python, or in Gemma's form
messages        answers that consist of messages with headers (gpt-oss)
value_types     text → JSON value, by a parameter's schema
call_grammar    the grammar of an answer that must be tool calls
"""

"""Splits what a model writes, while it is written, into content, reasoning and tool calls (docs/tools.md).

formats         how each family of models writes them: data; chat template → format
parser          text in pieces → deltas
reader          the cursor over the text, for generators that wait for more
sections        calls written as JSON objects or as named JSON
typed           calls written as tagged parameters, as Python, or in Gemma's form
call_grammar    the grammar of an answer that must be tool calls
"""

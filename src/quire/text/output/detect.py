"""Which format a model writes, from its chat template: the template shows the model how its earlier calls looked."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from quire.text.output.format import NamedCalls, OutputFormat
from quire.text.output.formats import FORMATS, THINK

# Name of a format → what its templates hold, all of it. Tried in this order: special marks before general ones.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>", "commentary")),
    ("minimax", ("<minimax:tool_call>",)),
    ("seed", ("<seed:tool_call>", "<function=")),
    ("qwen3-coder", ("<tool_call>", "<function=", "<parameter=")),
    ("glm-4.x", ("<tool_call>", "<arg_key>", "<arg_value>")),
    ("deepseek-v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek-v3.1", ("<｜tool▁calls▁begin｜>",)),
    ("kimi-k2", ("<|tool_calls_section_begin|>",)),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral-json", ("[TOOL_CALLS]",)),
    ("solar", ("<|tool_call:begin|>",)),
    ("granite", ("<|tool_call|>",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("apriel", ("<tool_calls>", "[BEGIN FINAL RESPONSE]")),
    ("lfm2", ("<|tool_list_start|>",)),
    ("llama4-pythonic", ("<|python_start|>",)),
    ("llama4-pythonic", ("[func_name1(params_name1=params_value1",)),
    ("functionary-v3.1", ("<function=", "</function>")),
    ("functionary-v3.2", (">>>", "recipient")),
    ("functionary-v3.2", (">>>all",)),
    ("hermes", ("<tool_call>",)),
    ("llama3-json", ('"parameters": ', "ipython")),
    ("functools", ("functools[",)),
    ("gigachat", ("<|function_call|>",)),
    ("gigachat", ("'function call'", "role_sep")),
    ("gemma-4", ("<|tool_call>", "<|channel>")),
    ("command-r", ("Action:", '"tool_name"')),
)
# Other marks of reasoning than <think>.
_REASONING = (("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


@lru_cache(maxsize=64)
def detect_format(template: str | None) -> OutputFormat:
    """Return the format that fits the template: `plain` where it shows neither calls nor reasoning."""
    if not template:
        return FORMATS["plain"]
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return _with_reasoning(FORMATS[name], template)
    return FORMATS["reasoning"] if THINK[1] in template else FORMATS["plain"]


def _with_reasoning(format: OutputFormat, template: str) -> OutputFormat:
    """A format has the reasoning marks that its template knows; a model without them may write <think> as text."""
    if format.harmony or format.name in ("apriel", "gemma-4"):
        return format
    for begin, end in (THINK, *_REASONING):
        if end in template:
            return replace(format, reasoning=(begin, end))
    return replace(format, reasoning=None)


def prompt_opening(format: OutputFormat, prompt: str) -> str:
    """Return the mark with which the rendered prompt ends, so that the answer begins inside what it opens: the parser
    reads it first. "" where there is none."""
    calls = format.calls
    marks = [format.reasoning[0]] if format.reasoning is not None else []
    if isinstance(calls, NamedCalls) and not format.opens:
        marks.append(calls.open)
    return next((mark for mark in marks if prompt.rstrip().endswith(mark.rstrip())), "")

"""Which format a model writes, from its chat template: the template shows the model how its earlier calls looked."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from quire.text.output.format import NamedCalls, OutputFormat
from quire.text.output.formats import FORMATS

THINK = ("<think>", "</think>")
_REASONING = (THINK, ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))


@lru_cache(maxsize=64)
def detect_format(template: str | None) -> OutputFormat:
    """Return the format that fits the template: `plain` where it shows neither calls nor reasoning."""
    if not template:
        return FORMATS["plain"]
    for format in FORMATS.values():
        if any(all(sign in template for sign in signs) for signs in format.signs):
            return _with_reasoning(format, template)
    return FORMATS["reasoning"] if THINK[1] in template else FORMATS["plain"]


def _with_reasoning(format: OutputFormat, template: str) -> OutputFormat:
    """A format has the reasoning marks that its template knows; a model without them may write <think> as text."""
    if format.harmony or format.keeps_reasoning:
        return format
    for begin, end in _REASONING:
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

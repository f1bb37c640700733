"""How a text of tokens is cut into the windows that a model sees, and which tokens of each are scored.

hf          Hugging Face's sliding windows: each begins ``stride`` tokens after the last one, and only the tokens
            that no earlier window has are scored; all but the text's first one are, once

    tokens    0 ……… stride ……… context ……… context + stride
    window 1  |·sssssssssssssss|
    window 2        |···········|ssssssss|

llama.cpp   ``llama-perplexity``: chunks of ``context`` tokens side by side, of whose second half all but the
            first token are scored; the rest of the text is left out. Where the model begins texts with a token
            of its own, it takes the place of each chunk's first one
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that a model sees at once; those from ``first`` on (at least 1) are scored."""

    token_ids: tuple[int, ...]
    first: int


def sliding(token_ids: Sequence[int], context: int, stride: int) -> Iterator[Window]:
    """Yield Hugging Face's windows over a text; ``stride`` is 1 … ``context``."""
    scored = 1
    for start in range(0, len(token_ids), stride):
        stop = min(start + context, len(token_ids))
        first = max(scored, start + 1)
        if first < stop:
            yield Window(tuple(token_ids[start:stop]), first - start)
        scored = stop
        if stop == len(token_ids):
            return


def halves(token_ids: Sequence[int], context: int, begin: Sequence[int] = ()) -> Iterator[Window]:
    """Yield llama.cpp's chunks; ``begin`` is what the model begins each with, none or one token."""
    for start in range(0, len(token_ids) - context + 1, context):
        chunk = token_ids[start : start + context]
        yield Window((*begin, *chunk[len(begin) :]), context // 2 + 1)

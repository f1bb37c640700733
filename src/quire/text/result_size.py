"""How large the result of an operation in a template would be, told before it is made (upper bounds, in characters).

Only the operations that make much out of little are here: with them bounded, and every other result charged once it is
there, the memory of a rendering is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2.exceptions import SecurityError

_PERCENT_WIDTH = re.compile(r"%[^a-zA-Z%]*?(?:\d{6,}|\*)")
_BRACE_WIDTH = re.compile(r"\{[^{}]*(?:[:.]\D*\d{6,}|:[^{}]*\{)")
_MAX_BITS = 100_000


def binop_size(operator: str, left: Any, right: Any) -> int:
    """Bound the size of ``left operator right`` for `+`, `*`, `**` and `%`; 0 where it is small anyway."""
    if operator == "+":
        return _length(left) + _length(right)
    if operator == "%":
        if isinstance(left, str):
            _check_width(_PERCENT_WIDTH, left)
            return len(left) + _length(right)
        return 0
    if isinstance(left, int) and isinstance(right, int):
        bits = (
            left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        )
        if bits > _MAX_BITS:
            raise SecurityError(f"a number of {bits} bits (at most {_MAX_BITS})")
        return 0
    if isinstance(left, int):
        left, right = right, left
    return _length(left) * max(right, 0) if operator == "*" and isinstance(right, int) else 0


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | bytes) else 0


def _check_width(pattern: re.Pattern[str], text: str) -> None:
    if pattern.search(text):
        raise SecurityError(
            f"a format with a width of six digits or more, or one that is computed: {text[:60]!r}"
        )


def _replace(value: Any, old: str, new: str, *_: Any, **__: Any) -> int:
    text = str(value)
    return len(text) + text.count(str(old)) * len(str(new))


def _join_method(separator: str, items: Iterable[Any]) -> int:
    # An iterator would be used up by counting: the items of a string are its characters at most.
    return _join(items, separator) if isinstance(items, list | tuple) else 0


def _join(items: Any, d: Any = "", *_: Any, **__: Any) -> int:
    if not isinstance(items, list | tuple):
        return 0
    return sum(_length(item) for item in items) + len(str(d)) * len(items)


def _padded(text: Any, width: int = 80, *_: Any, **__: Any) -> int:
    return len(str(text)) + width


def _expandtabs(text: str, tabsize: int = 8) -> int:
    return len(text) + text.count("\t") * tabsize


def _indent(value: Any, width: int | str = 4, *_: Any, **__: Any) -> int:
    text = str(value)
    return len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width))


def _wordwrap(
    text: Any, width: int = 79, break_long_words: bool = True, wrapstring: str | None = None, **_: Any
) -> int:
    text = str(text)
    return len(text) + (len(text) // max(width, 1) + 1) * len(wrapstring or "\n")


def _percent_format(text: Any, *args: Any, **kwargs: Any) -> int:
    _check_width(_PERCENT_WIDTH, str(text))
    return len(str(text)) + sum(_length(value) for value in (*args, *kwargs.values()))


def brace_format_size(text: str, *args: Any, **kwargs: Any) -> int:
    """Bound the size of `text.format(…)` and `text.format_map(…)`; refuse widths that are large or computed."""
    _check_width(_BRACE_WIDTH, text)
    return len(text) * (1 + sum(_length(value) for value in (*args, *kwargs.values())))


def _count(_: Any, count: int = 1, *__: Any, **___: Any) -> int:
    return count


def _json(_: Any, ensure_ascii: bool = False, indent: int | str | None = None, *__: Any, **___: Any) -> int:
    if (indent if isinstance(indent, int) else len(indent or "")) > 64:
        raise SecurityError(f"tojson with an indent of {indent!r} (at most 64)")
    return 0


Size = Callable[..., int]

# Methods of str, called with the string itself first.
METHOD_SIZES: Mapping[str, Size] = {
    "replace": _replace,
    "join": _join_method,
    "center": _padded,
    "ljust": _padded,
    "rjust": _padded,
    "zfill": _padded,
    "expandtabs": _expandtabs,
}

# Filters, called with the filtered value first.
FILTER_SIZES: Mapping[str, Size] = {
    "replace": _replace,
    "join": _join,
    "center": _padded,
    "indent": _indent,
    "wordwrap": _wordwrap,
    "format": _percent_format,
    "batch": _count,
    "slice": _count,
    "tojson": _json,
}

"""A Lark grammar of a text → the grammar of the same text inside a JSON string, where some characters are escaped.

Every terminal is rewritten: in a string the characters are escaped, and a regular expression is parsed and written
again with escapes in place of the characters that JSON escapes. Rules stay as they are.
"""

from __future__ import annotations

import json
import re
import re._constants as op  # type: ignore[import-not-found]
import re._parser as parser  # type: ignore[import-not-found]
from collections.abc import Iterable
from typing import Any

from quire.errors import RequestError

_TOKEN = re.compile(
    r"""(?P<space>//[^\n]*|\#[^\n]*)
      | (?P<range>"(?:\\.|[^"\\])+"\s*\.\.\s*"(?:\\.|[^"\\])+")
      | (?P<string>"(?:\\.|[^"\\\n])*"i?)
      | (?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)
      | %import\s+common\s*\.\s*(?P<common>\w+)(?:\s*->\s*(?P<alias>\w+))?
      | (?P<other>%(?:json|lark|regex)\b)""",
    re.VERBOSE,
)
# The terminals of Lark's common.lark.
_COMMON = {
    "LF": r"\n", "CR": r"\r", "NEWLINE": r"(\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+", "DIGIT": r"[0-9]",
    "INT": r"[0-9]+", "SIGNED_INT": r"[+-]?[0-9]+", "HEXDIGIT": r"[a-fA-F0-9]", "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]", "LETTER": r"[a-zA-Z]", "WORD": r"[a-zA-Z]+", "CNAME": r"[_a-zA-Z][_a-zA-Z0-9]*",
    "NUMBER": r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?", "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+", "FLOAT": r"[0-9]+\.[0-9]+([eE][+-]?[0-9]+)?",
}  # fmt: skip
_SHORT = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r", 0x22: '"', 0x5C: "\\"}
_ESCAPED = (*range(0x20), 0x22, 0x5C)  # code points that JSON escapes
_END = 0x10FFFF
_CLASSES = {
    op.CATEGORY_DIGIT: [(48, 57)],
    op.CATEGORY_SPACE: [(9, 13), (32, 32)],
    op.CATEGORY_WORD: [(48, 57), (65, 90), (95, 95), (97, 122)],
}
_NEGATED = {
    op.CATEGORY_NOT_DIGIT: op.CATEGORY_DIGIT,
    op.CATEGORY_NOT_SPACE: op.CATEGORY_SPACE,
    op.CATEGORY_NOT_WORD: op.CATEGORY_WORD,
}
Ranges = list[tuple[int, int]]


def lark_in_json(grammar: str) -> str:
    """Return ``grammar`` for a text between the quotes of a JSON string.

    Raises:
        RequestError: a terminal that cannot be written so (a look-around, a nested grammar).
    """

    def terminal(match: re.Match[str]) -> str:
        if match["space"] is not None:
            return ""
        if match["other"] is not None:
            raise RequestError(f"{match['other']} is not supported in the grammar of a custom tool")
        if match["common"] is not None:
            name = match["common"]
            if name not in _COMMON:
                raise RequestError(f"%import common.{name} is not known; known are {', '.join(_COMMON)}")
            return f"{match['alias'] or name}: /{_regex(_COMMON[name], '')}/"
        if match["range"] is not None:
            low, high = (_unquoted(part) for part in re.findall(r'"(?:\\.|[^"\\])+"', match["range"]))
            return f"/{_one_of([(ord(low), ord(high))])}/"
        if match["string"] is not None:
            return _string(match["string"])
        body, _, flags = match["regex"][1:].rpartition("/")
        return f"/{_regex(body, flags)}/"

    return _TOKEN.sub(terminal, grammar)


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(text, strict=False))
    except ValueError:
        return str(json.loads(re.sub(r"\\([^\"\\/bfnrtu])", r"\1", text), strict=False))


def _string(text: str) -> str:
    plain = _unquoted(text.removesuffix("i"))
    if text.endswith("i"):
        return f"/{_regex(re.escape(plain), 'i')}/"
    return quoted(json.dumps(plain, ensure_ascii=False)[1:-1])


def quoted(text: str) -> str:
    """Return ``text`` as a string of Lark: JSON's, without the one control character that JSON does not escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _regex(pattern: str, flags: str) -> str:
    try:
        tree = parser.parse(pattern, sum({getattr(re, flag.upper()) for flag in flags if flag in "imsx"}))
    except (re.error, OverflowError, RecursionError) as error:
        raise RequestError(f"the regular expression /{pattern:.60}/ cannot be read: {error}") from None
    return _written(tree, tree.state.flags)


def _written(tree: Iterable[tuple[Any, Any]], flags: int) -> str:
    return "".join([_node(kind, value, flags) for kind, value in tree])


def _node(kind: Any, value: Any, flags: int) -> str:
    if kind is op.LITERAL:
        return _one_of(_cased([(value, value)], flags))
    if kind is op.NOT_LITERAL:
        return _one_of(_others([(value, value)]))
    if kind is op.ANY:
        return _one_of([(0, _END)] if flags & re.DOTALL else _others([(10, 10)]))
    if kind is op.IN:
        return _one_of(_cased(_members(value), flags))
    if kind is op.BRANCH:
        return "(" + "|".join([_written(branch, flags) for branch in value[1]]) + ")"
    if kind is op.SUBPATTERN:
        _, add, remove, inner = value
        return "(" + _written(inner, (flags | add) & ~remove) + ")"
    if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
        low, high, inner = value
        bounds = f"{low}," if high is op.MAXREPEAT else f"{low},{high}"
        return f"({_written(inner, flags)}){{{bounds}}}"
    raise RequestError(f"{kind} in a regular expression is not supported in the grammar of a custom tool")


def _members(items: Iterable[tuple[Any, Any]]) -> Ranges:
    ranges: Ranges = []
    negated = False
    for kind, value in items:
        if kind is op.NEGATE:
            negated = True
        elif kind is op.RANGE:
            ranges.append(value)
        elif kind is op.LITERAL:
            ranges.append((value, value))
        else:
            ranges += _CLASSES[value] if value in _CLASSES else _others(_CLASSES[_NEGATED[value]])
    return _others(ranges) if negated else ranges


def _cased(ranges: Ranges, flags: int) -> Ranges:
    """Return the ranges with the letters of A…Z and a…z in both cases, under the flag."""
    if not flags & re.IGNORECASE:
        return ranges
    swapped = [
        (max(low, first) + shift, min(high, last) + shift)
        for low, high in ranges
        for first, last, shift in ((65, 90, 32), (97, 122, -32))
        if max(low, first) <= min(high, last)
    ]
    return [*ranges, *swapped]


def _others(ranges: Ranges) -> Ranges:
    """Return all characters that are in none of ``ranges``."""
    gaps, begin = [], 0
    for low, high in sorted(ranges):
        if low > begin:
            gaps.append((begin, low - 1))
        begin = max(begin, high + 1)
    return [*gaps, (begin, _END)] if begin <= _END else gaps


def _one_of(ranges: Ranges) -> str:
    """Return the pattern of one of these characters in a JSON string."""
    escaped = [code for code in _ESCAPED if any(low <= code <= high for low, high in ranges)]
    plain = _others([*_others(ranges), (0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
    plain = _others(_others(plain))
    parts = ["[" + "".join([_span(low, high) for low, high in plain]) + "]"] if plain else []
    parts += [r"\\" + (re.escape(_SHORT[code]) if code in _SHORT else f"u{code:04x}") for code in escaped]
    return parts[0] if len(parts) == 1 else "(" + "|".join(parts) + ")"


def _span(low: int, high: int) -> str:
    return _code(low) if low == high else f"{_code(low)}-{_code(high)}"


def _code(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:x}}}"

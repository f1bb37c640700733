"""`Ignored`: the fields of one request that have no effect on its answer, and how unknown names are judged."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

MIN_CHARS = 5  # of an unknown name that may be a misspelled one
MAX_EDITS = 2
MAX_NAMES = 20  # in the header
MAX_KEPT = 1000  # paths of one request; the cost of the others is a dictionary lookup

Judged = Literal["all", "misspelled", "none"]
_INDEX = re.compile(r"\[\d+\]")


class Ignored(list[str]):
    """Paths of ignored fields, each once: ``messages[].mood`` stands for every message.

    ``refused`` says which unknown names are refused: all (``--strict-fields``), those that are probably misspelled
    names of used fields, or none (``--lenient``).
    """

    def __init__(self, refused: Judged = "misspelled") -> None:
        super().__init__()
        self.refused: Judged = refused

    def append(self, path: str) -> None:
        """Keep ``path``, up to a limit."""
        if len(self) < MAX_KEPT:
            super().append(path)

    @classmethod
    def of(cls, *, lenient: bool, strict: bool) -> Ignored:
        """Return an empty list under the settings ``--lenient`` and ``--strict-fields``; the latter one wins."""
        return cls("all" if strict else "none" if lenient else "misspelled")

    def header(self) -> list[tuple[bytes, bytes]]:
        """Return the header of the answer that lists the fields; none without any."""
        paths = list(dict.fromkeys(_INDEX.sub("[]", path) for path in self))
        if not paths:
            return []
        more = [f"and {len(paths) - MAX_NAMES} more"] if len(paths) > MAX_NAMES else []
        shown = ", ".join([path[:100] for path in paths[:MAX_NAMES]] + more)
        text = "".join(char if " " <= char <= "~" else "?" for char in shown)
        return [(b"x-quire-ignored-fields", text.encode())]


def misspelled(name: str, used: Iterable[str]) -> str | None:
    """Return the used name that ``name`` is one or two edits away from, the nearest one; else None."""
    if not MIN_CHARS <= len(name) <= 64:
        return None
    letters = set(name)
    near = [
        (edits(name, other), other)
        for other in used
        # An edit changes the length by one at most, and the set of letters by two.
        if abs(len(name) - len(other)) <= MAX_EDITS
        and len(letters.symmetric_difference(other)) <= 2 * MAX_EDITS
    ]
    num_edits, other = min(near, default=(MAX_EDITS + 1, ""))
    return other if num_edits <= MAX_EDITS else None


def edits(a: str, b: str) -> int:
    """Return the number of insertions, deletions, replacements and swaps of neighbours that make ``b`` of ``a``.

    This is the optimal string alignment distance (Damerau 1964).
    """
    before: list[int] = []
    last = list(range(len(b) + 1))
    for i, char in enumerate(a):
        row = [i + 1]
        for j, other in enumerate(b):
            row.append(min(last[j + 1] + 1, row[j] + 1, last[j] + (char != other)))
            if i and j and char == b[j - 1] and a[i - 1] == other:
                row[-1] = min(row[-1], before[j - 1] + 1)
        before, last = last, row
    return last[-1]

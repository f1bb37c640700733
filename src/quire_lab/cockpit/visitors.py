"""`Visitor`: what this process remembers of one browser: its keys and its conversation. In memory, never on disk."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

_MAX_VISITORS = 1000


@dataclass(slots=True)
class Visitor:
    """One browser. Keys are sent to the watched server alone, with every request."""

    key: str | None = None
    admin_key: str | None = None
    is_dark: bool | None = None  # None: as the browser says
    kept: dict[str, Any] = field(default_factory=dict)  # shown again when the page comes back, by page


class Visitors:
    """The browsers by the id in their signed cookie; the least recently seen is forgotten first."""

    def __init__(self) -> None:
        self._visitors: OrderedDict[str, Visitor] = OrderedDict()

    def of(self, browser_id: str) -> Visitor:
        visitor = self._visitors.setdefault(browser_id, Visitor())
        self._visitors.move_to_end(browser_id)
        if len(self._visitors) > _MAX_VISITORS:
            self._visitors.popitem(last=False)
        return visitor

"""Answers of ``/v1/responses`` that were to be stored, in memory, the least recently used going first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer, its input and the conversation it ends, all as JSON text."""

    response: bytes
    input_items: bytes
    messages: bytes  # as a chat template reads them, without instructions; the answer's own at the end

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.input_items) + len(self.messages)

    def conversation(self) -> list[dict[str, Any]]:
        return list(msgspec.json.decode(self.messages))


class ResponseStore:
    """At most ``max_bytes`` of answers; one that is larger alone is not kept."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._items: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, response_id: str, stored: Stored) -> None:
        """Keep an answer under an id that is new."""
        assert response_id not in self._items
        self._items[response_id] = stored
        self.num_bytes += stored.num_bytes
        while self.num_bytes > self.max_bytes:
            _, oldest = self._items.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def get(self, response_id: str) -> Stored | None:
        """Return an answer, which is then the most recently used, or None."""
        stored = self._items.get(response_id)
        if stored is not None:
            self._items.move_to_end(response_id)
        return stored

    def delete(self, response_id: str) -> bool:
        """Forget an answer; return whether it was there."""
        stored = self._items.pop(response_id, None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes
        return stored is not None

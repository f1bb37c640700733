"""`ResponseStore`: answers of ``/v1/responses``, in memory and on disk."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.durable import Records
from quire.errors import ConfigError
from quire.metrics.log import Log

_ID = re.compile(r"resp_[^.]+")
log = Log("api")
# What a stored answer takes next to its texts. It bounds their number, too.
_STORED_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, its input and the conversation that it ends, all as JSON text."""

    response: bytes
    input_items: bytes
    # The conversation as a chat template reads it, without instructions; the answer is its end.
    messages: bytes

    @property
    def num_bytes(self) -> int:
        return _STORED_BYTES + len(self.response) + len(self.input_items) + len(self.messages)

    def conversation(self) -> list[dict[str, Any]]:
        return list(msgspec.json.decode(self.messages))


class ResponseStore:
    """Answers of ``/v1/responses`` in memory: at most ``max_bytes``, the least recently used are dropped first.

    A tenant finds its own answers alone. With a folder, answers made in the background are on disk too, as ID.json, so
    that a restart does not lose them.
    """

    def __init__(self, max_bytes: int, folder: Path | None = None) -> None:
        """Read the folder.

        Raises:
            ConfigError: it cannot be used.
        """
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._items: OrderedDict[tuple[str, str], Stored] = OrderedDict()  # (tenant, id) → answer
        try:
            self._disk = None if folder is None else Records(folder, tuple[str, Stored], _ID)
            for response_id, (tenant, stored) in () if self._disk is None else self._disk.all():
                self._add((tenant, response_id), stored)
        except OSError as error:
            raise ConfigError(f"The folder {folder} of responses cannot be used: {error}.") from error

    def __len__(self) -> int:
        return len(self._items)

    def put(self, tenant: str, response_id: str, stored: Stored, *, durable: bool = False) -> None:
        """Keep an answer under its id. ``durable``: on disk, too, as long as there is room on it."""
        if durable and self._disk is not None:
            try:
                self._disk.put(response_id, (tenant, stored))
            except OSError as error:
                log.error("response_not_written", id=response_id, error=str(error))
        self._add((tenant, response_id), stored)

    def _add(self, key: tuple[str, str], stored: Stored) -> None:
        before = self._items.pop(key, None)  # an answer that a gateway resumed here twice
        self.num_bytes -= before.num_bytes if before is not None else 0
        self._items[key] = stored
        self.num_bytes += stored.num_bytes
        while self.num_bytes > self.max_bytes:
            (_, oldest_id), oldest = self._items.popitem(last=False)
            self.num_bytes -= oldest.num_bytes
            self._unlink(oldest_id)

    def _unlink(self, response_id: str) -> None:
        if self._disk is not None:
            self._disk.delete(response_id)

    def entries(self) -> list[tuple[str, str, Stored]]:
        """Return tenant, id and answer of each, for `restore` in another server."""
        return [(*key, stored) for key, stored in self._items.items()]

    def restore(self, entries: Any) -> None:
        """Add the `entries` of another server."""
        for tenant, response_id, stored in msgspec.convert(entries, list[tuple[str, str, Stored]]):
            self._add((tenant, response_id), stored)

    def get(self, tenant: str, response_id: str) -> Stored | None:
        """Return an answer, which is then the most recently used, or None."""
        key = (tenant, response_id)
        stored = self._items.get(key)
        if stored is not None:
            self._items.move_to_end(key)
        return stored

    def item(self, tenant: str, item_id: str) -> dict[str, Any] | None:
        """Return the item of this id in the output of an answer, the newest answers first, or None."""
        for (owner, _), stored in reversed(self._items.items()):
            if owner == tenant and item_id.encode() in stored.response:
                output = msgspec.json.decode(stored.response)["output"]
                hit = next((item for item in output if item.get("id") == item_id), None)
                if hit is not None:
                    return dict(hit)
        return None

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete an answer; return whether it was stored."""
        stored = self._items.pop((tenant, response_id), None)
        if stored is not None:
            self.num_bytes -= stored.num_bytes
            self._unlink(response_id)
        return stored is not None

"""`BatchFolder`: what a batch leaves on disk.

batches/ID.json           the batch object: written whole at each change of its state
batches/ID.output.jsonl   answered lines, appended as they come; what is in here, or in
batches/ID.errors.jsonl   … is not run again
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from quire.api.file_store import write_json

_ID = re.compile(r"batch_[0-9a-f]{32}")


class BatchFolder:
    """The folder ``root/batches``."""

    def __init__(self, root: Path, unix_time: Callable[[], float]) -> None:
        self._folder = root / "batches"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._unix_time = unix_time

    def load(self) -> dict[str, dict[str, Any]]:
        """Return the batches that are there, by id."""
        paths = [path for path in self._folder.glob("*.json") if _ID.fullmatch(path.stem)]
        return {path.stem: msgspec.json.decode(path.read_bytes()) for path in paths}

    def lines(self, batch: dict[str, Any], kind: str) -> Path:
        """Where lines of a batch are; ``kind``: output or errors."""
        return self._folder / f"{batch['id']}.{kind}.jsonl"

    def append(self, batch: dict[str, Any], kind: str, line: bytes) -> None:
        with self.lines(batch, kind).open("ab") as file:
            file.write(line)

    def set_status(self, batch: dict[str, Any], status: str) -> None:
        """Change the state of a batch, with its time, and write it down."""
        batch["status"] = status
        batch[f"{status}_at"] = int(self._unix_time())
        self.save(batch)

    def save(self, batch: dict[str, Any]) -> None:
        write_json(self._folder / f"{batch['id']}.json", batch)

"""Where each block of one root lies: built from the segments of all processes, and never trusted by a read."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from quire.tiers.segment import Entry, SegmentFile
from quire.tiers.spans import Place


class BlockIndex:
    """Open segments and their blocks. A key that two segments have belongs to the one that was added last."""

    def __init__(self) -> None:
        self.files: dict[Path, SegmentFile] = {}
        self.num_evicted = 0
        self._places: dict[bytes, Place] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are known."""
        places = self._places
        for index, key in enumerate(keys):
            if key not in places:
                return index
        return len(keys)

    def leading(self, keys: Sequence[bytes]) -> list[Place]:
        """Return the places of the leading keys that are known."""
        places: list[Place] = []
        for key in keys:
            place = self._places.get(key)
            if place is None:
                break
            places.append(place)
        return places

    def add(self, file: SegmentFile, entries: Iterable[Entry]) -> None:
        """Add blocks of a segment, which is opened with the first of them."""
        with self._lock:
            self.files[file.path] = file
            for entry in entries:
                self._places[entry.key] = Place(file, entry)
                file.keys.append(entry.key)

    def drop(self, place: Place) -> None:
        """Remove a block that turned out not to be whole, unless it has been written elsewhere meanwhile."""
        with self._lock:
            if self._places.get(place.entry.key) == place:
                del self._places[place.entry.key]

    def forget(self, paths: Iterable[Path]) -> None:
        """Remove segments that are no longer in the folder."""
        for path in list(paths):
            file = self.files.get(path)
            if file is not None:
                file.is_removed = True
                self._forget(file)

    def clear(self) -> None:
        """Remove all segments; nothing counts as evicted."""
        num_evicted = self.num_evicted
        for file in list(self.files.values()):
            self._forget(file)
        self.num_evicted = num_evicted

    def _forget(self, file: SegmentFile) -> None:
        with self._lock:
            if self.files.get(file.path) is file:
                del self.files[file.path]
            for key in file.keys:
                place = self._places.get(key)
                if place is not None and place.file is file:
                    del self._places[key]
                    self.num_evicted += 1
            file.keys.clear()

"""`MemoryReturn`: gives memory back to the system after a burst or after large bodies.

The C library keeps freed memory for later. After 40 bodies of 30 MiB that was 3 GiB, for as long as the process ran.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from quire.http.held_bytes import is_at_rest

GROWTH_BYTES = 48 << 20  # beyond what was left last time, before it is worth the work
EVERY_S = 5.0
_STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    """Return what this process has in memory; 0 where the system does not tell."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def family_bytes(pid: int | None = None) -> int:
    """Return what this process (or ``pid``) and its children have in memory; shared pages count for each of them."""
    root = Path(f"/proc/{pid or os.getpid()}")
    try:
        num_pages = int((root / "statm").read_text().split()[1])
        tasks = [(task / "children").read_text().split() for task in (root / "task").iterdir()]
    except OSError:  # it has ended, or the system does not tell
        return 0
    children = sum(family_bytes(int(child)) for task in tasks for child in task)
    return num_pages * os.sysconf("SC_PAGE_SIZE") + children


def trim() -> None:
    """Return the C library's free memory to the system. Other threads may run meanwhile."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(ctypes.c_size_t(0))


class MemoryReturn:
    """Decides when to trim. ``run`` gets what is to be done outside of the loop."""

    def __init__(
        self, run: Callable[[Callable[[], None]], object], resident: Callable[[], int] = resident_bytes
    ) -> None:
        self._run = run
        self._resident = resident
        self._left: int | None = None  # bytes, after the last trim
        self._next_s = 0.0

    def look(self, now: float) -> None:
        """Trim if this process has grown since the last time and holds nothing large now; to be called often."""
        if now < self._next_s:
            return
        self._next_s = now + EVERY_S
        resident = self._resident()
        if self._left is None:
            self._left = resident
        elif resident > self._left + GROWTH_BYTES and is_at_rest():
            self._run(self._trim)

    def _trim(self) -> None:
        trim()
        self._left = self._resident()

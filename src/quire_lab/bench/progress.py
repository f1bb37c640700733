"""Lines that say that a long command still works, on a terminal and in a pipe."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 5.0


@contextmanager
def ticking(text: Callable[[float], str], every_s: float = EVERY_S) -> Iterator[None]:
    """Print ``text(seconds so far)`` to stderr every few seconds while the block runs."""
    begin_s, over = time.monotonic(), threading.Event()

    def tick() -> None:
        while not over.wait(every_s):
            print(text(time.monotonic() - begin_s), file=sys.stderr, flush=True)

    thread = threading.Thread(target=tick, name="quire-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

"""`Prefault`: touches memory that will be written soon, before a step has to.

The system gives anonymous memory page by page, zeroed, to whoever writes first. In a virtual machine that takes 1 ms a
MiB and more: 4 … 8 % of a prompt's first token went there (Llama 1B, SmolLM2 135M with int8 weights, 2026-11-22). So a
thread stays a few steps' worth of pages ahead of what is used. It works while no step runs, and at the lowest priority:
beside a step it would take from the decodes what it saves the prompts. Where nothing is ever idle, steps touch their
pages themselves, as before.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time

_MADV_POPULATE_WRITE = 23  # Linux 5.14: fault the pages in, writable, contents as they are
_PIECE = 8 << 20  # bytes at a time: a step that begins waits for one piece at most
_PAUSE_S = 0.005  # without a step, before each piece


class Prefault:
    """Keeps ``ahead`` bytes behind those in use touched, of the mapping at ``address``.

    ``owner`` is what the memory belongs to: it is held while a thread runs, and no longer.
    """

    def __init__(self, owner: object, address: int, num_bytes: int, ahead: int) -> None:
        self._owner = owner
        self._address = address
        self._num_bytes = num_bytes
        self._ahead = ahead if sys.platform == "linux" else 0
        self._touched = 0
        self._wanted = 0
        self._steps = 0
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None

    def use(self, num_bytes: int) -> None:
        """The first ``num_bytes`` are in use. Returns at once."""
        self._touched = max(self._touched, min(num_bytes, self._num_bytes))
        self._wanted = max(self._wanted, min(num_bytes + self._ahead, self._num_bytes))
        lacking = self._wanted - self._touched
        if lacking > self._ahead // 2 and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """A step begins."""
        self._steps += 1
        self._idle.clear()

    def resume(self) -> None:
        """It is over."""
        self._idle.set()

    def join(self) -> None:
        """Wait until what was wanted is touched."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread alone
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        page = os.sysconf("SC_PAGESIZE")
        while self._touched < self._wanted:
            before = self._steps
            time.sleep(_PAUSE_S)
            if before != self._steps or not self._idle.is_set():
                self._idle.wait()
                continue
            start = (self._address + self._touched) // page * page
            end = min(start + _PIECE, self._address + self._num_bytes)
            if advise(start, end - start, _MADV_POPULATE_WRITE):
                self._ahead = 0  # an older system: steps touch their pages themselves
                return
            self._touched = max(self._touched, end - self._address)

"""How many threads the native kernels use: a property of the process, like torch's own number.

Threads belong to the machine, not to an engine: two engines in one process share them and take turns
(csrc/bindings.cpp). The number changes the speed alone.

Torch's threads and ours must not both be many. An OpenMP worker spins for milliseconds after each of torch's parallel
regions, on the core that our pinned worker needs: a decode step of a 1B model took 332 ms with two and two threads and
103 ms where OpenMP's did not spin (one run each on a busy machine, before our own spinning threads yielded).
So an engine whose heavy ops are all native gives torch one thread.

`BetweenSteps` holds threads back that have other work, while a step runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire.clock import Clock
from quire.cores import thread_cpus

try:
    from quire import _native as native
except ImportError:
    native = None  # type: ignore[assignment]

# Without a step before tables for grammars are built, or a packed file is written: a part of that takes up to a second.
QUIET_S = 1.0
PAUSE_S = 0.02  # between two looks whether steps run
_one_at_a_time = threading.Lock()  # since MKL has one number of threads per process
_chosen = 0  # 0: not chosen, so torch's number counts


def choose_threads(num_threads: int, *, torch_is_heavy: bool) -> None:
    """Give the native kernels ``num_threads``, and torch as many where it still does heavy work, else one."""
    global _chosen
    assert num_threads >= 1
    torch.set_num_threads(num_threads if torch_is_heavy else 1)
    _chosen = 0 if torch_is_heavy else num_threads
    if native is not None:
        native.place_threads(thread_cpus())


def num_native_threads() -> int:
    """Return the number for the next native call."""
    return _chosen or torch.get_num_threads()


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Run torch's products on the calling thread alone.

    A library may split a long sum between its threads anywhere: MKL does so for in_features ≥ 1024 on an Intel CPU, in
    fp32 and bf16. So a product whose bits must not depend on the number of threads is computed by one.
    """
    with _one_at_a_time:
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # 0.25 µs
        try:
            yield
        finally:
            torch.set_num_threads(before)


class BetweenSteps:
    """When an engine runs no step: its threads for other work ask before each small part of it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_running = False
        self._ended_s = clock.now()  # end of the last step
        self._is_closed = threading.Event()

    def step_begins(self) -> None:
        """Other work rests until `step_ended`."""
        self._is_running = True

    def step_ended(self) -> None:
        """Work may go on, if there is no other step until then."""
        self._ended_s = self._clock.now()
        self._is_running = False

    def wait(self, quiet_s: float) -> bool:
        """Wait until no step has run for ``quiet_s``; return False if the engine ends before."""
        while not self._is_closed.is_set():
            if not self._is_running and self._clock.now() - self._ended_s >= quiet_s:
                return True
            self._is_closed.wait(PAUSE_S)
        return False

    def close(self) -> None:
        """The engine ends."""
        self._is_closed.set()

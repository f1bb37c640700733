"""`RankGroup`: the processes of an engine's ranks on this machine, from their start to their end. Torch-free.

They are started all at once with ``python -m``, so a script needs no main guard. One that dies takes the group down.
"""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from quire import errors
from quire.config import EngineConfig
from quire.device import core_groups, numa_nodes, usable_cpus
from quire.errors import ConfigError, EngineDeadError, ModelLoadError, QuireError
from quire.executor.base import RankLoaded
from quire.executor.child_process import child_environment
from quire.executor.rank_messages import Answer, Channel, RankBoot, RankFailure, encode
from quire.metrics.log import configured

_FATE_S = 0.5  # how long the group is looked at for the rank that ended first
_GRACE_S = 2.0


@dataclass(slots=True)
class RankProcess:
    """One rank, as its parent sees it."""

    number: int
    popen: subprocess.Popen[bytes]
    channel: Channel
    life: socket.socket  # closed to end the process

    def fate(self) -> str:
        """Return how the process ended, in words."""
        status = self.popen.poll()
        if status is None:
            return "closed its connection"
        if status < 0:
            name = signal.Signals(-status).name
            return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"exited with status {status}"


class RankGroup:
    """Started by the constructor; `close` ends it in every case."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the ranks and wait until each has loaded its part.

        Raises:
            ModelLoadError, ConfigError: of a rank, with its number.
            EngineDeadError: a rank died while it loaded, or no process can be started.
        """
        self._ranks: list[RankProcess] = []
        self._answering = config.topology.answering_rank
        self._answers: deque[Answer] = deque()
        self._poll = select.poll()
        self._is_closed = False
        try:
            self._start(config)
            self.loaded = self._wait_loaded()
        except BaseException:
            self.close(grace_s=0.0)
            raise

    @property
    def pids(self) -> list[int]:
        return [rank.popen.pid for rank in self._ranks]

    def broadcast(self, frame: bytes) -> None:
        """Send a frame to every rank, and take in what the ranks send meanwhile, so that no side waits for the other.

        Raises:
            EngineDeadError: a rank has died; the group is closed.
        """
        left = {rank.number: memoryview(frame) for rank in self._ranks}
        while left:
            for rank in self._ranks:
                if rank.number not in left:
                    continue
                try:
                    sent = rank.channel.sock.send(left[rank.number], socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
                except OSError:
                    raise self._lost(rank, None) from None
                left[rank.number] = left[rank.number][sent:]
                if not left[rank.number]:
                    del left[rank.number]
            if left:
                self._receive(timeout_ms=1)

    def answer(self) -> Answer:
        """Wait for the next answer.

        Raises:
            EngineDeadError: a rank has died; the group is closed.
        """
        while not self._answers:
            self._receive(timeout_ms=None)
        return self._answers.popleft()

    def close(self, grace_s: float = _GRACE_S) -> None:
        """End every rank: it exits when its connection closes, and is killed after ``grace_s``."""
        if self._is_closed:
            return
        self._is_closed = True
        for rank in self._ranks:
            rank.life.close()
            rank.channel.sock.close()
        until_s = time.monotonic() + grace_s
        for rank in self._ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.popen.wait(max(0.0, until_s - time.monotonic()))
                continue
            rank.popen.kill()
            rank.popen.wait()

    def _start(self, config: EngineConfig) -> None:
        world = config.topology.world_size
        cores, (level, style) = cores_of(world, config.runner.num_threads), configured()
        for number in range(world):
            ours, theirs = socket.socketpair()
            life, their_life = socket.socketpair()
            with theirs, their_life:
                fds = (theirs.fileno(), their_life.fileno())
                try:
                    popen = subprocess.Popen(
                        [sys.executable, "-P", "-m", "quire.executor.rank", str(number), *map(str, fds)],
                        stdin=subprocess.DEVNULL,
                        stdout=2,  # a library's prints must not mix with this process's output
                        pass_fds=fds,
                        env=child_environment(),
                    )
                except OSError as error:
                    ours.close()
                    life.close()
                    raise EngineDeadError(f"Rank {number} cannot be started: {error}") from error
            self._ranks.append(RankProcess(number, popen, Channel(ours), life))
            self._poll.register(ours, select.POLLIN)
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it is dead already, which is found when it is waited for
                rank.channel.send(encode(RankBoot(config, rank.number, cores[rank.number], level, style)))

    def _wait_loaded(self) -> list[RankLoaded]:
        loaded: dict[int, RankLoaded] = {}
        while len(loaded) < len(self._ranks):
            for rank, message in self._ready(None):
                if isinstance(message, RankFailure):
                    raise _load_error(rank.number, message)
                if message is None:
                    self._await_fate()
                    raise EngineDeadError(
                        f"Rank {rank.number} (process {rank.popen.pid}) {rank.fate()} while it loaded."
                    )
                assert isinstance(message, RankLoaded)
                loaded[rank.number] = message
        return [loaded[number] for number in sorted(loaded)]

    def _receive(self, timeout_ms: int | None) -> None:
        for rank, message in self._ready(timeout_ms):
            if not isinstance(message, Answer):
                raise self._lost(rank, message)
            self._answers.append(message)

    def _ready(self, timeout_ms: int | None) -> Sequence[tuple[RankProcess, object]]:
        """Return the ranks that have said something, and what; None: it is dead. The answering rank comes first."""
        by_fd = {rank.channel.sock.fileno(): rank for rank in self._ranks}
        ready = [by_fd[fd] for fd, _ in self._poll.poll(timeout_ms)]
        ready.sort(key=lambda rank: rank.number != self._answering)
        return [(rank, rank.channel.receive()) for rank in ready]

    def _await_fate(self) -> None:
        until_s = time.monotonic() + _FATE_S
        while time.monotonic() < until_s and all(rank.popen.poll() is None for rank in self._ranks):
            time.sleep(0.01)

    def _lost(self, rank: RankProcess, message: object) -> EngineDeadError:
        """Close the group, and return what ended it: a rank that was killed, or else what the first one said."""
        self._await_fate()
        killed = [each for each in self._ranks if (each.popen.poll() or 0) < 0]
        if killed:
            rank, message = killed[0], None
        reason = f": {message.text}" if isinstance(message, RankFailure) else f" {rank.fate()}"
        text = f"Rank {rank.number} (process {rank.popen.pid}){reason}"
        self.close(grace_s=0.0)
        return EngineDeadError(text)


def cores_of(world: int, num_threads: int) -> list[tuple[int, ...]]:
    """Return the cores that each rank is pinned to: whole memory nodes where they can be shared out so.

    None where a rank would have more threads than cores.
    """
    nodes = numa_nodes()
    cores = sorted(usable_cpus())
    groups = nodes if len(nodes) == world else core_groups(cores, world)
    if len(cores) < world or any(len(group) < num_threads for group in groups):
        return [()] * world
    return [tuple(sorted(group)) for group in groups]


def _load_error(rank: int, failure: RankFailure) -> QuireError:
    text = f"Rank {rank}: {failure.text}"
    kind = getattr(errors, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, ModelLoadError | ConfigError):
        return kind(text)
    return EngineDeadError(text)

"""`RankGroup`: the running ranks of an engine, wherever they run: what is sent to them and comes back. Torch-free.

One rank that dies takes the group down: the others may wait for it in the middle of a step.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from quire import errors
from quire.config import EngineConfig
from quire.errors import ConfigError, EngineDeadError, ModelLoadError, QuireError
from quire.executor.base import RankLoaded
from quire.executor.rank_messages import Answer, Channel, RankBoot, RankCounts, RankFailure, encode
from quire.metrics.engine_stats import LayerLoad
from quire.metrics.log import configured
from quire.parallel.placement import Meeting

_FATE_S = 0.5  # seconds to find the rank that ended first
GRACE_S = 2.0


class RankHandle(Protocol):
    """One started rank, as the engine sees it."""

    number: int
    channel: Channel
    life: socket.socket  # the rank ends when it closes
    cores: tuple[int, ...]  # cores to pin the rank to; empty: not pinned
    memory: str  # name of the shared memory of its node; empty: none
    meeting: Meeting | None  # see `RankBoot`

    @property
    def name(self) -> str:
        """Its number and its process, for messages."""
        ...

    @property
    def is_killed(self) -> bool:
        """Whether a signal has ended it, or its machine."""
        ...

    def fate(self) -> str:
        """Return how it ended, in words."""
        ...

    def wait(self, until_s: float) -> None:
        """Wait for its end until ``until_s`` of `time.monotonic`, then kill it."""
        ...


class RankGroup:
    """Owns its ranks: `close` ends them in every case. ``clean_up`` is called once, after their end."""

    def __init__(
        self, config: EngineConfig, ranks: Sequence[RankHandle], clean_up: Callable[[], None], *, fingerprint: str = ""
    ) -> None:  # fmt: skip
        """Wait until each rank has loaded its part. ``fingerprint``: as of `RankBoot`.

        Raises:
            ModelLoadError, ConfigError: of a rank, with its number.
            EngineDeadError: a rank died while it loaded.
        """
        self._ranks, self._clean_up = ranks, clean_up
        self._answering = config.topology.answering_rank
        self._answers: deque[Answer] = deque()
        self._poll = select.poll()
        self._is_closed = False
        self.counts = [RankCounts() for _ in ranks]
        self.experts: dict[int, LayerLoad] = {}  # the last, by layer
        self.num_moved = 0  # experts
        level, style = configured()
        try:
            for rank in ranks:
                self._poll.register(rank.channel.sock, select.POLLIN)
                boot = RankBoot(
                    config, rank.number, rank.cores, level, style, rank.memory, rank.meeting, fingerprint
                )
                with contextlib.suppress(OSError):  # it is dead already, which is found when it is waited for
                    rank.channel.send(encode(boot))
            self.loaded = self._wait_loaded()
        except BaseException:
            self.close(grace_s=0.0)
            raise

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
                    self._lost(rank, None)
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

    def close(self, grace_s: float = GRACE_S) -> None:
        """End every rank: it exits when its connection closes, and is killed after ``grace_s``."""
        if self._is_closed:
            return
        self._is_closed = True
        for rank in self._ranks:
            rank.life.close()
            rank.channel.sock.close()
        until_s = time.monotonic() + grace_s
        for rank in self._ranks:
            rank.wait(until_s)
        self._clean_up()

    def _wait_loaded(self) -> list[RankLoaded]:
        loaded: dict[int, RankLoaded] = {}
        while len(loaded) < len(self._ranks):
            for rank, message in self._ready(None):
                if isinstance(message, RankFailure):
                    raise _load_error(rank, message)
                if message is None:
                    self._await_fate()
                    raise EngineDeadError(f"{rank.name} {rank.fate()} while it loaded.")
                assert isinstance(message, RankLoaded)
                loaded[rank.number] = message
        return [loaded[number] for number in sorted(loaded)]

    def _receive(self, timeout_ms: int | None) -> None:
        for rank, message in self._ready(timeout_ms):
            if isinstance(message, RankCounts):
                self.counts[rank.number] = message
            elif isinstance(message, LayerLoad):
                self.experts[message.layer] = message
                self.num_moved += message.num_moved
            elif isinstance(message, Answer):
                self._answers.append(message)
            else:
                self._lost(rank, message)

    def _ready(self, timeout_ms: int | None) -> list[tuple[RankHandle, Any]]:
        """Return the ranks that have said something, and what; None: it is dead. The answering rank comes first."""
        by_fd = {rank.channel.sock.fileno(): rank for rank in self._ranks}
        ready = [by_fd[fd] for fd, _ in self._poll.poll(timeout_ms)]
        ready.sort(key=lambda rank: rank.number != self._answering)
        return [(rank, rank.channel.receive()) for rank in ready]

    def _await_fate(self) -> None:
        until_s = time.monotonic() + _FATE_S
        while time.monotonic() < until_s and not any(rank.is_killed for rank in self._ranks):
            time.sleep(0.01)

    def _lost(self, rank: RankHandle, message: RankFailure | None) -> NoReturn:
        """Close the group, and raise what ended it: a rank that was killed, or else what the first one said."""
        self._await_fate()
        killed = [other for other in self._ranks if other.is_killed]
        if killed:
            rank, message = killed[0], None
        text = f"{rank.name} {rank.fate()}" if message is None else f"{rank.name}: {message.text}"
        self.close(grace_s=0.0)
        raise EngineDeadError(text)


def _load_error(rank: RankHandle, failure: RankFailure) -> QuireError:
    text = f"{rank.name}: {failure.text}"
    kind = getattr(errors, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, ModelLoadError | ConfigError):
        return kind(text)
    return EngineDeadError(text)

"""The ranks of one machine: a process each, started all at once by ``python -m``, so a script needs no main guard."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from quire.config import EngineConfig
from quire.cores import core_groups, numa_nodes, usable_cpus
from quire.errors import EngineDeadError
from quire.executor.child_process import child_environment
from quire.executor.rank_group import RankGroup, RankHandle
from quire.executor.rank_messages import Channel
from quire.parallel.placement import Meeting
from quire.parallel.segment import Segment, remove, slot_bytes_of
from quire.parallel.topology import Topology


@dataclass(slots=True)
class LocalRank:
    """A `RankHandle` of this machine."""

    number: int
    channel: Channel
    life: socket.socket
    cores: tuple[int, ...]
    memory: str
    popen: subprocess.Popen[bytes]
    meeting: Meeting | None = None

    @property
    def name(self) -> str:
        return f"Rank {self.number} (process {self.popen.pid})"

    @property
    def is_killed(self) -> bool:
        return (self.popen.poll() or 0) < 0

    def fate(self) -> str:
        status = self.popen.poll()
        if status is None:
            return "closed its connection"
        if status < 0:
            name = signal.Signals(-status).name
            return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        return f"exited with status {status}"

    def wait(self, until_s: float) -> None:
        try:
            self.popen.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


def start_here(config: EngineConfig) -> RankGroup:
    """Start the ranks of ``config`` on this machine. Raises as `RankGroup`."""
    ranks: list[RankHandle] = []
    cores = cores_of(config.topology.world_size, config.runner.num_threads)
    memory = make_memory(config.topology, slot_bytes_of(config.model.spec, config.topology))
    links = _links(config.topology)
    try:
        for number, ends in enumerate(links):
            ranks.append(_start(number, ends, cores[number], memory))
    except OSError as error:
        for rank in ranks:
            rank.life.close()
            rank.wait(0.0)
        remove(memory)
        raise EngineDeadError(f"Rank {len(ranks)} cannot be started: {error}") from error
    finally:
        for end in [end for ends in links for end in ends if end is not None]:
            end.close()
    group = RankGroup(config, ranks, lambda: remove(memory))
    remove(memory)  # every rank has mapped it: whatever dies now, nothing is left
    return group


def make_memory(topology: Topology, slot_bytes: int) -> str:
    """Make the shared memory of the ranks of one machine; return its name, empty where they need none.

    ``slot_bytes``: as `slot_bytes_of` says.

    Raises:
        ConfigError: /dev/shm has too little room.
    """
    if topology.per_stage == 1:
        return ""
    name = f"quire-{os.getpid()}-{secrets.token_hex(4)}"
    Segment.create(name, topology, slot_bytes)
    return name


def _start(
    number: int, links: Sequence[socket.socket | None], cores: tuple[int, ...], memory: str
) -> LocalRank:
    channel, theirs = socket.socketpair()
    life, their_life = socket.socketpair()
    with theirs, their_life:
        try:
            popen = start_process(number, memory, [theirs, their_life, *links, None])
        except OSError:
            channel.close()
            life.close()
            raise
    return LocalRank(number, Channel(channel), life, cores, memory, popen)


def start_process(
    number: int, memory: str, sockets: Sequence[socket.socket | None]
) -> subprocess.Popen[bytes]:
    """Start a rank's process with the sockets that `quire.executor.rank` names, in its order; None: there is none."""
    fds = [-1 if end is None else end.fileno() for end in sockets]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "quire.executor.rank", str(number), memory, *map(str, fds)],
        stdin=subprocess.DEVNULL,
        stdout=2,  # a library's prints must not mix with this process's output
        pass_fds=[fd for fd in fds if fd >= 0],
        env=child_environment(),
    )


def _links(topology: Topology) -> list[list[socket.socket | None]]:
    """Return for each rank its ends of the connections to the stages before and after."""
    links: list[list[socket.socket | None]] = [[None, None] for _ in range(topology.world_size)]
    with contextlib.ExitStack() as made:
        for rank in range(topology.world_size):
            after = topology.stage_neighbour(rank, 1)
            if after is not None:
                links[rank][1], links[after][0] = map(made.enter_context, socket.socketpair())
        made.pop_all()
    return links


def cores_of(world: int, num_threads: int) -> list[tuple[int, ...]]:
    """Return the cores that each rank is pinned to: whole memory nodes where they can be shared out so.

    None where a rank would have more threads than cores.
    """
    nodes = numa_nodes()
    groups = nodes if len(nodes) == world else core_groups(world)
    if len(usable_cpus()) < world or any(len(group) < num_threads for group in groups):
        return [()] * world
    return [tuple(sorted(group)) for group in groups]

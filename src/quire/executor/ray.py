"""Ranks placed by Ray on several machines, as `parallel.placement` says. Torch-free.

Ray starts one `RayRank` per rank, in a placement group with a bundle per stage, or per node that shares a stage. Each
starts the process of `quire.executor.rank` and passes it connected TCP sockets: to the engine, and to the stages beside
it. So steps do not go through Ray, and a rank is the same as on one machine.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from quire import __version__
from quire.config import EngineConfig
from quire.errors import ConfigError, EngineDeadError
from quire.executor.rank_group import GRACE_S, RankGroup, RankHandle
from quire.executor.rank_messages import Channel
from quire.executor.rank_processes import make_memory, start_process
from quire.extras import needs
from quire.kernels.collective import LIMIT_S
from quire.metrics.log import Log
from quire.models.checkpoint import describe
from quire.models.fingerprint import fingerprint
from quire.parallel.placement import Meeting, Placement, place
from quire.parallel.segment import remove, slot_bytes_of
from quire.parallel.topology import Topology

_STARTING_S = LIMIT_S  # for the cluster to find room, and for every rank to connect
_KNOCKING_S = 5.0  # for the head of a cluster to accept a connection
_TOKEN_BYTES = 16
log = Log("ray")


class Address(NamedTuple):
    """Where a process listens."""

    host: str
    port: int


class NodeInfo(NamedTuple):
    """What a `RayRank` tells of its node."""

    address: Address  # where the stage before connects to
    version: str
    hostname: str


class RayRank:
    """A Ray actor that starts one rank's process on its node, and ends with it."""

    def __init__(self, number: int, token: bytes) -> None:
        self._number, self._token, self._memory = number, token, ""
        self._listener = socket.create_server(("", 0))
        self._store: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def info(self) -> NodeInfo:
        from ray.util import get_node_ip_address  # type: ignore[import-not-found,unused-ignore]

        host = get_node_ip_address()  # type: ignore[no-untyped-call,unused-ignore]
        address = Address(host, self._listener.getsockname()[1])
        return NodeInfo(address, __version__, socket.gethostname())

    def open_store(self) -> int:
        """Listen for the ranks of the stage, which meet at this one; return the port."""
        self._store = socket.create_server(("", 0))
        return int(self._store.getsockname()[1])

    def make_memory(self, topology: Topology, slot_bytes: int) -> str:
        """Make the shared memory of the node; see `quire.executor.rank_processes.make_memory`."""
        self._memory = make_memory(topology, slot_bytes)
        return self._memory

    def remove_memory(self) -> None:
        """Remove its name: every rank of the node has mapped it, or never will."""
        remove(self._memory)

    def start(self, engine: Address, after: Address | None, has_before: bool) -> int:
        """Connect to the engine and to the next stage, wait for the stage before; return the process's id."""
        with ExitStack() as ends:
            own = [self._connect(engine, kind) for kind in ("channel", "life")]
            mine_after = None if after is None else self._connect(after, "stage")
            before = self._accept() if has_before else None
            sockets = [*own, before, mine_after, self._store]
            for end in sockets:
                if end is not None:
                    ends.enter_context(end)
            self._listener.close()
            self._process = start_process(self._number, self._memory, sockets)
        return self._process.pid

    def wait(self) -> int:
        """Wait for the end of the process; return its status."""
        assert self._process is not None
        return self._process.wait()

    def _connect(self, to: Address, kind: str) -> socket.socket:
        end = socket.create_connection(to, timeout=_STARTING_S)
        end.sendall(self._token + f"{kind} {self._number}".encode().ljust(32))
        return prepared(end)

    def _accept(self) -> socket.socket:
        self._listener.settimeout(_STARTING_S)
        while True:
            end, _ = self._listener.accept()
            if greeting_of(end, self._token) is not None:
                return prepared(end)
            end.close()


def prepared(end: socket.socket) -> socket.socket:
    """Set a connection up for small messages, and for the death of a whole machine to be seen within seconds."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 5000),
    ):
        if hasattr(socket, option):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return end


def greeting_of(end: socket.socket, token: bytes) -> tuple[str, int] | None:
    """Return the kind of a connection and the rank that made it; None: it does not know the token."""
    end.settimeout(5.0)
    try:
        data = end.recv(_TOKEN_BYTES + 32, socket.MSG_WAITALL)
    except OSError:
        return None
    if not secrets.compare_digest(data[:_TOKEN_BYTES], token):
        return None
    kind, number = data[_TOKEN_BYTES:].decode().split()
    return kind, int(number)


@dataclass(slots=True)
class RemoteRank:
    """A `RankHandle` of a process that a `RayRank` started. ``ended()`` → its status, or None while it runs."""

    number: int
    channel: Channel
    life: socket.socket
    where: str
    ended: Callable[[], int | None]
    memory: str
    meeting: Meeting | None
    cores: tuple[int, ...] = ()  # Ray shares cores out

    @property
    def name(self) -> str:
        return f"Rank {self.number} ({self.where})"

    @property
    def is_killed(self) -> bool:
        return (self.ended() or 0) < 0

    def fate(self) -> str:
        status = self.ended()
        if status is None:
            return "closed its connection: it has ended, or its node has left"
        return (
            f"was killed by signal {-status}, or its node or Ray's daemon there has ended"
            if status < 0
            else f"exited with status {status}"
        )

    def wait(self, until_s: float) -> None:
        while self.ended() is None and time.monotonic() < until_s:
            time.sleep(0.02)


def start_on_ray(config: EngineConfig) -> RankGroup:
    """Place and start the ranks of ``config`` on a running Ray cluster, or on one that is started here.

    Raises:
        ConfigError: Ray is absent, no cluster answers, or it has no room; versions or checkpoints differ.
        EngineDeadError: a rank died while it started.
    """
    ray = _connected(config.ray.address if config.ray is not None else None)
    assert config.ray is not None
    topology, token = config.topology, secrets.token_bytes(_TOKEN_BYTES)
    placement = place(topology, config.ray.nodes)
    group = _placed(ray, config, placement)
    actors: list[Any] = []

    def clean_up() -> None:
        with contextlib.suppress(Exception):  # an actor may have died, usually with its node
            ray.get([actor.remove_memory.remote() for actor in actors], timeout=GRACE_S)
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)

    try:
        kind = ray.remote(num_cpus=config.runner.num_threads, max_concurrency=2)(RayRank)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for number in range(topology.world_size):
            where = strategy(group, placement_group_bundle_index=placement.bundle_of(number))
            actors.append(kind.options(scheduling_strategy=where).remote(number, token))
        ranks = _started(ray, actors, placement, slot_bytes_of(config.model.spec, topology), token)
    except Exception as error:
        clean_up()
        if isinstance(error, ray.exceptions.RayError | OSError):
            raise EngineDeadError(f"A rank cannot be started on Ray: {_line(error)}") from error
        raise
    path = Path(config.model.path)
    digest = "" if config.model.load_format == "random" else fingerprint(describe(path))
    started = RankGroup(config, ranks, clean_up, fingerprint=digest)
    ray.get([actor.remove_memory.remote() for actor in actors])
    return started


def _connected(address: str | None) -> Any:
    """Return the module ``ray``, connected to ``address``, to the cluster of this machine, or to a new one."""
    with needs("ray", "--executor ray", param="executor"):
        import ray  # type: ignore[import-not-found,unused-ignore]
        import ray.util.scheduling_strategies  # type: ignore[import-not-found,unused-ignore]
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if ray.is_initialized():
        return ray
    quiet: dict[str, Any] = {"configure_logging": False, "log_to_driver": True}
    address = address or os.environ.get("RAY_ADDRESS")
    try:
        try:
            _knock(address)
            ray.init(address=address or "auto", **quiet)
        except ConnectionError:
            if address is not None:
                raise
            ray.init(include_dashboard=False, **quiet)  # none runs here: start one
    except Exception as error:  # Ray's own kinds are many
        raise ConfigError(
            f"ray_address = {address!r}: no Ray cluster answers there: {_line(error)}"
        ) from error
    return ray


def _knock(address: str | None) -> None:
    """Raise OSError where nothing listens at ``host:port``: Ray itself would try for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCKING_S).close()


def _placed(ray: Any, config: EngineConfig, placement: Placement) -> Any:
    """Return a placement group with a bundle of cores for the ranks that share a node."""
    assert config.ray is not None
    nodes, count = config.ray.nodes, placement.num_bundles
    num_cpus = placement.per_bundle * config.runner.num_threads
    alive = [node for node in ray.nodes() if node["Alive"]]
    if nodes is not None and nodes > len(alive):
        raise ConfigError(
            f"nodes = {nodes}: the Ray cluster has {len(alive)}; start more with `ray start --address …`"
        )
    how = "STRICT_SPREAD" if nodes == count else "STRICT_PACK" if nodes == 1 else "SPREAD"
    group = ray.util.placement_group([{"CPU": num_cpus}] * count, strategy=how)
    if not group.wait(_STARTING_S):
        ray.util.remove_placement_group(group)
        have = ", ".join(f"{node['Resources'].get('CPU', 0):g}" for node in alive)
        raise ConfigError(
            f"{placement.topology} needs {count} bundles of {num_cpus} CPUs, {how.lower()} over nodes, and the Ray "
            f"cluster has nodes of {have} CPUs: give fewer ranks or threads, add nodes, or give more of them as nodes"
        )
    return group


def _started(
    ray: Any, actors: list[Any], placement: Placement, slot_bytes: int, token: bytes
) -> list[RankHandle]:
    infos, topology = _infos(ray, actors), placement.topology
    memories = [""] * placement.num_bundles
    if placement.shares_memory:
        firsts = actors[:: placement.per_bundle]
        memories = ray.get([actor.make_memory.remote(topology, slot_bytes) for actor in firsts])
    meetings = _meetings(ray, actors, infos, placement)
    host = ray.util.get_node_ip_address()
    with socket.create_server(("", 0)) as listener:
        engine = Address(host, listener.getsockname()[1])
        starting = []
        for number, actor in enumerate(actors):
            after, before = (topology.stage_neighbour(number, step) for step in (1, -1))
            to = None if after is None else infos[after].address
            starting.append(actor.start.remote(engine, to, before is not None))
        ends = _connections(ray, listener, starting, token, len(actors))
    pids = ray.get(starting, timeout=_STARTING_S)
    return [
        RemoteRank(
            number, Channel(ends["channel", number]), ends["life", number],
            f"process {pids[number]} on {infos[number].hostname}", _follow(ray, actor.wait.remote()),
            memories[placement.bundle_of(number)], meetings[number],
        )
        for number, actor in enumerate(actors)
    ]  # fmt: skip


def _meetings(
    ray: Any, actors: list[Any], infos: list[NodeInfo], placement: Placement
) -> list[Meeting | None]:
    """Return where each rank meets those of its stage on other nodes: at the stage's first rank."""
    if not placement.crossing:
        return [None] * len(actors)
    per_stage = placement.topology.per_stage
    ports = ray.get([actor.open_store.remote() for actor in actors[::per_stage]])
    return [
        Meeting(
            infos[number - number % per_stage].address.host, ports[number // per_stage], info.address.host,
            placement.crossing,
        )
        for number, info in enumerate(infos)
    ]  # fmt: skip


def _infos(ray: Any, actors: list[Any]) -> list[NodeInfo]:
    infos: list[NodeInfo] = ray.get([actor.info.remote() for actor in actors], timeout=_STARTING_S)
    other = next((info for info in infos if info.version != __version__), None)
    if other is not None:
        raise ConfigError(
            f"Quire is {other.version} on {other.hostname} and {__version__} here: install the same on every node"
        )
    return infos


def _connections(
    ray: Any, listener: socket.socket, starting: list[Any], token: bytes, world: int
) -> Mapping[tuple[str, int], socket.socket]:
    """Wait for two connections of every rank."""
    ends: dict[tuple[str, int], socket.socket] = {}
    listener.settimeout(0.25)
    until_s = time.monotonic() + _STARTING_S
    while len(ends) < 2 * world:
        ray.get(list(ray.wait(starting, num_returns=world, timeout=0)[0]))  # raises what a start raised
        if time.monotonic() > until_s:
            raise EngineDeadError(
                f"Only {len(ends) // 2} of {world} ranks have connected within {_STARTING_S:g} s."
            )
        try:
            end, _ = listener.accept()
        except TimeoutError:
            continue
        greeting = greeting_of(end, token)
        if greeting is None:
            end.close()
        else:
            ends[greeting] = prepared(end)
    return ends


def _follow(ray: Any, waiting: Any) -> Callable[[], int | None]:
    """Return what tells the status of a process by the result of `RayRank.wait`; −9 where its node or Ray has ended."""

    def ended() -> int | None:
        try:
            done, _ = ray.wait([waiting], timeout=0)
            return ray.get(waiting) if done else None
        except ray.exceptions.RayError:
            return -9

    return ended


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]

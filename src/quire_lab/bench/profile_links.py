"""Times of the collectives between two ranks of this machine, as a step runs them; see `measure_links`.

Each rank is a process, ``python -m quire_lab.bench.profile_links RANK NAME FOLDER SEND RECEIVE``, pinned to a core of
its own: the shared memory, a folder to meet in for Gloo, and the descriptors of two sockets. Rank 0 prints the seconds.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from quire.clock import WallClock
from quire.cost.links import LinkCost, Links
from quire.errors import ConfigError
from quire.kernels.collective import Group
from quire.kernels.collective.distributed import TorchGroup
from quire.kernels.collective.native import attach
from quire.kernels.tape import StepTape
from quire.kernels.threads import choose_threads
from quire.parallel.segment import Segment, remove
from quire.parallel.topology import Topology
from quire.parallel.traffic import Kind, Transport, sent
from quire.runner.stage_links import StageLinks
from quire_lab.bench.profile_serving import START_TIMEOUT_S

HIDDEN = 2048
ROWS = (1, 4, 16, 64, 128)
CALLS = 4  # in a recorded step
REPEATS = 40
TWO = Topology(tp=2)


def measure_links() -> Links:
    """Measure in about five seconds: collectives in shared memory and over Gloo, and sends from stage to stage.

    Raises:
        ConfigError: this machine has no room for the shared memory, or a rank fails; with its last line.
    """
    name = f"quire-links-{os.getpid()}"
    Segment.create(name, TWO)
    ends = [socket.socketpair(), socket.socketpair()]  # 0 → 1 and 1 → 0
    sockets = [(ends[0][0], ends[1][1]), (ends[1][0], ends[0][1])]  # per rank: to send, to receive
    ranks: list[subprocess.Popen[str]] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            ranks += [_start(rank, name, folder, *sockets[rank]) for rank in range(2)]
            for pair in ends:
                for end in pair:
                    end.close()
            outputs = [rank.communicate(timeout=START_TIMEOUT_S) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"the links were not measured within {START_TIMEOUT_S:.0f} s: is the machine busy?"
        ) from None
    finally:
        remove(name)
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, rank in enumerate(ranks):
        if rank.returncode:
            last = (outputs[number][1].strip().splitlines() or ["it was killed"])[-1]
            raise ConfigError(f"the links were not measured: rank {number}: {last}")
    return {op: LinkCost.fit(points) for op, points in json.loads(outputs[0][0]).items()}


def _start(
    rank: int, name: str, folder: str, to: socket.socket, source: socket.socket
) -> subprocess.Popen[str]:
    fds = [to.fileno(), source.fileno()]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "quire_lab.bench.profile_links", str(rank), name, folder, *map(str, fds)],
        pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def main(argv: list[str]) -> None:
    """Be one rank."""
    rank, name, folder, to, source = int(argv[1]), argv[2], argv[3], int(argv[4]), int(argv[5])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    choose_threads(1, torch_is_heavy=False)
    group = attach(Segment.attach(name, TWO), rank).of_layers
    assert group is not None
    points = _in_shared_memory(group)
    points["send"] = _sends(rank, socket.socket(fileno=to), socket.socket(fileno=source))
    with _gloo(rank, folder) as other:
        points |= _over_gloo(other)
    if rank == 0:
        print(json.dumps(points))


def _in_shared_memory(group: Group) -> dict[str, list[list[float]]]:
    x = torch.randn(max(ROWS), HIDDEN)

    def reduce() -> torch.Tensor:
        return group.all_reduce(x, torch.bfloat16)

    def gather() -> torch.Tensor:
        return group.all_gather(x)

    def exchange() -> torch.Tensor:
        return group.all_to_all(x)

    points: dict[str, list[list[float]]] = {}
    calls: dict[Kind, Callable[[], torch.Tensor]] = {
        "all_reduce": reduce, "all_gather": gather, "all_to_all": exchange,
    }  # fmt: skip
    for kind, call in calls.items():

        def forward(call: Callable[[], torch.Tensor] = call) -> torch.Tensor:
            for _ in range(CALLS):
                y = call()
            return y[:1]

        tape = StepTape(forward, max(ROWS), 1)
        points[kind] = [_point(kind, rows, partial(tape.run, rows, 1), CALLS) for rows in ROWS]
    y = torch.zeros(2 * max(ROWS), HIDDEN)
    points["gather_parts"] = [
        _point("gather_parts", rows, partial(group.gather_parts, y[: 2 * rows], [0, rows, 2 * rows]))
        for rows in ROWS
    ]
    return points


def _sends(rank: int, to: socket.socket, source: socket.socket) -> list[list[float]]:
    """Send hidden states to the other rank and back: half of it is a send."""
    links = StageLinks(source, to, max(ROWS), HIDDEN, torch.bfloat16, WallClock())
    hidden = torch.zeros(max(ROWS), HIDDEN, dtype=torch.bfloat16)
    both = hidden, hidden.float()

    def there_and_back(rows: int) -> None:
        if rank == 0:
            links.send(both, rows)
            links.receive(rows)
        else:
            links.receive(rows)
            links.send(both, rows)

    times = [_least(lambda rows=rows: there_and_back(rows)) for rows in ROWS]  # type: ignore[misc]
    return [[sent("send", rows * 3 * HIDDEN, 2, 2, 2), s / 2] for rows, s in zip(ROWS, times, strict=True)]


def _over_gloo(group: Group) -> dict[str, list[list[float]]]:
    x = torch.randn(max(ROWS), HIDDEN)

    def points(kind: Kind, call: Callable[[int], torch.Tensor]) -> list[list[float]]:
        return [_point(kind, rows, partial(call, rows), transport="gloo") for rows in ROWS]

    return {
        "all_reduce gloo": points("all_reduce", lambda n: group.all_reduce(x[:n], torch.bfloat16)),
        "all_gather gloo": points("all_gather", lambda n: group.all_gather(x[:n])),
    }


@contextmanager
def _gloo(rank: int, folder: str) -> Iterator[TorchGroup]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        yield TorchGroup()
    finally:
        dist.destroy_process_group()


def _point(
    kind: Kind, rows: int, call: Callable[[], Any], calls: int = 1, transport: Transport = "shared"
) -> list[float]:
    return [sent(kind, rows * HIDDEN, 2, 4, 2, transport), _least(call) / calls]


def _least(call: Callable[[], Any]) -> float:
    """Return the least seconds: a rank that waits for its core is no cost of the link."""
    taken = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start_s)
    return min(taken)


if __name__ == "__main__":
    main(sys.argv)

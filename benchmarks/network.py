"""Two pipeline stages in two network namespaces: bytes and seconds per step, beside the planner's.

    sudo python benchmarks/network.py [quill] [--gbit 1] [--ms 0.5] [--rounds 20]

Needs root, `ip` and /dev/net/tun. Each namespace has a TUN device, and a process moves the packets between them: it
holds each until the link has had time for its bits, and then for the latency: it needs no netem in the kernel. The
engine and the first stage are in one namespace, the second stage in the other; what they exchange goes over the link.

Predicted bytes are those of `parallel.traffic.uses`. Predicted seconds are those of the same stages over socket pairs
of this machine, less these sends (`quire profile --parallel`), plus a send over the link and the latency of the answer.
The namespaces and the link are removed in every case.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from statistics import median

from quire.args import EngineArgs
from quire.clock import WallClock
from quire.config import EngineConfig
from quire.cost.links import LinkCost
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.executor.rank_group import RankGroup
from quire.executor.rank_messages import Channel
from quire.executor.rank_processes import LocalRank, cores_of, start_process
from quire.executor.ranks import RanksExecutor
from quire.executor.ray import prepared
from quire.parallel.shard import shard
from quire.parallel.traffic import step_bytes, uses
from quire.request import SamplingParams
from quire.step import StepPlan, StepResult
from quire_lab.bench.profile_links import measure_links
from quire_lab.bench.profile_steps import Case, StepProfiler

HOSTS = ("10.213.7.1", "10.213.7.2")
MTU = 9000
CASES = (
    Case(num_decodes=1, context=32), Case(num_decodes=8, context=32), Case(num_decodes=32, context=32),
    Case(num_chunks=1, chunk=64), Case(num_chunks=1, chunk=128), Case(num_chunks=1, chunk=256),
)  # fmt: skip
REPEATS = 3  # of a case before the other executor has its turn
TUN, SET_NAME, NEW_NET = 0x1001, 0x400454CA, 0x40000000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="quill")
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--ms", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=20, help=f"of {REPEATS} steps of each kind")
    args = parser.parse_args()
    if os.geteuid() != 0 or not os.path.exists("/dev/net/tun"):
        raise SystemExit("network namespaces need root and /dev/net/tun")
    settings = EngineArgs(model=args.model, threads=1, pipeline_parallel_size=2, kv_memory="256MiB")
    config, _ = configure(settings, detect_device())
    send = measure_links()["send"]
    link = LinkCost(args.ms / 1e3, 8e-9 / args.gbit)
    found = uses(shard(config.model.spec, config.topology, 0), config.model.dtype)
    with wire(args.gbit * 1e9, args.ms / 1e3) as spaces, ExitStack() as stack:
        near = Timed(RanksExecutor(config), config)
        stack.callback(near.close)
        far = Timed(RanksExecutor(config, start=lambda c: start_apart(c, spaces)), config)
        stack.callback(far.close)
        for _ in range(args.rounds):  # in turn, so that whatever else runs on the machine disturbs both alike
            for case in CASES:
                near.visit(case)
                far.visit(case)
        far.count()
    print(f"{args.model}, two stages, {args.gbit:g} Gb/s, {args.ms:g} ms\n")
    print(
        "| tokens of the step | bytes predicted | ms over socket pairs | ms predicted | ms over the link | |"
    )
    print("|---|---|---|---|---|---|")
    for case in CASES:
        rows = case.num_rows
        wanted = step_bytes(found, rows, case.num_seqs)
        near_s, far_s = median(near.seconds[rows]), median(far.seconds[rows])
        predicted = near_s - send.seconds(wanted) + link.seconds(wanted) + link.alpha_s
        print(
            f"| {rows} | {wanted:,.0f} | {near_s * 1e3:.2f} | {predicted * 1e3:.2f} | {far_s * 1e3:.2f} | "
            f"{predicted / far_s - 1:+.1%} |"
        )
    wanted = sum(len(times) * step_bytes(found, rows, 0) for rows, times in far.seconds.items())
    print(
        f"\n{far.bytes_sent:,} bytes sent in all steps, {wanted:,.0f} predicted: {far.bytes_sent / wanted - 1:+.2%}"
    )


class Timed:
    """An executor that notes the seconds of each step, by its tokens."""

    max_in_flight, chains_steps = 1, False

    def __init__(self, inner: RanksExecutor, config: EngineConfig) -> None:
        self._inner, self.seconds, self.bytes_sent = inner, defaultdict[int, list[float]](list), 0
        self._rows, self._start_s = 0, 0.0
        sampling = SamplingParams(temperature=0.0)
        self._profiler = StepProfiler(self, config, WallClock(), sampling, max_blocks=128)
        self._profiler.fill()

    def visit(self, case: Case) -> None:
        """Run the case a few times."""
        self._profiler.visit(case, REPEATS)

    def count(self) -> None:
        """Take in what the first stage has sent."""
        time.sleep(0.2)
        self.submit(StepPlan(1 << 30))  # takes in the counts of the steps before
        self.collect()
        self.bytes_sent = self._inner.rank_stats().bytes_sent[0]

    def submit(self, plan: StepPlan) -> None:
        self._rows, self._start_s = sum(seq.num_scheduled_tokens for seq in plan.seqs), time.perf_counter()
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        result = self._inner.collect()
        self.seconds[self._rows].append(time.perf_counter() - self._start_s)
        return result

    def close(self) -> None:
        self._inner.close()


def start_apart(config: EngineConfig, spaces: tuple[str, str]) -> RankGroup:
    """Start the first stage beside the engine, and the second one in the other namespace."""
    near, far = spaces
    channel, life = connection(near, far), connection(near, far)
    stages = connection(near, far)
    here, here_life = socket.socketpair(), socket.socketpair()
    cores = cores_of(2, 1)
    with inside(near):
        first = start_process(0, "", [here[1], here_life[1], None, stages[0], None])
    with inside(far):
        last = start_process(1, "", [channel[1], life[1], stages[1], None, None])
    for end in (here[1], here_life[1], channel[1], life[1], *stages):
        end.close()
    ranks = [
        LocalRank(0, Channel(here[0]), here_life[0], cores[0], "", first),
        LocalRank(1, Channel(channel[0]), life[0], cores[1], "", last),
    ]
    return RankGroup(config, ranks, lambda: None)


def connection(near: str, far: str) -> tuple[socket.socket, socket.socket]:
    """Return the ends of a TCP connection between the namespaces."""
    with inside(near):
        listener = socket.create_server((HOSTS[0], 0))
    with listener, inside(far):
        theirs = socket.create_connection(listener.getsockname(), timeout=10.0)
        return prepared(listener.accept()[0]), prepared(theirs)


@contextmanager
def inside(space: str) -> Iterator[None]:
    """Make sockets and processes in the namespace ``space``."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{space}") as there:
        if libc.setns(there.fileno(), NEW_NET):
            raise OSError(ctypes.get_errno(), f"setns {space}")
        try:
            yield
        finally:
            libc.setns(home.fileno(), NEW_NET)


@contextmanager
def wire(bits_per_s: float, latency_s: float) -> Iterator[tuple[str, str]]:
    """Make two namespaces that a link joins; remove them and it afterwards."""
    spaces = f"quire-a-{os.getpid()}", f"quire-b-{os.getpid()}"
    child, ends = 0, []
    try:
        for number, space in enumerate(spaces):
            name = f"qw{os.getpid() % 100000}{'ab'[number]}"
            ip("netns", "add", space)
            ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
            fcntl.ioctl(ends[-1], SET_NAME, struct.pack("16sH22x", name.encode(), TUN))
            ip("link", "set", name, "netns", space)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", name, "mtu", str(MTU), "up")
            ip("-n", space, "addr", "add", HOSTS[number], "peer", HOSTS[1 - number], "dev", name)
        child = os.fork()
        if not child:
            with suppress(KeyboardInterrupt):
                carry(ends, bits_per_s, latency_s, os.getppid())
            os._exit(0)
        yield spaces
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for end in ends:
            os.close(end)
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], stderr=subprocess.DEVNULL, check=False)


def carry(ends: list[int], bits_per_s: float, latency_s: float, parent: int) -> None:
    """Move packets between the two ``ends``, each when the link is free, its bits have gone and the latency is over."""
    waiting: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
    free_s = [0.0, 0.0]
    while os.getppid() == parent:
        due_s = min((queue[0][0] for queue in waiting if queue), default=time.perf_counter() + 1.0)
        # `select` wakes late: the last 100 µs are spent looking.
        ready, _, _ = select.select(ends, [], [], max(0.0, due_s - time.perf_counter() - 1e-4))
        for end in ready:
            at, now_s = ends.index(end), time.perf_counter()
            with suppress(BlockingIOError):
                packet = os.read(end, 65536)
                free_s[at] = max(free_s[at], now_s) + 8 * len(packet) / bits_per_s
                waiting[at].append((free_s[at] + latency_s, packet))
        for at, queue in enumerate(waiting):
            while queue and queue[0][0] <= time.perf_counter():
                with suppress(OSError):  # the other end is not up yet
                    os.write(ends[1 - at], queue.popleft()[1])


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


if __name__ == "__main__":
    main()

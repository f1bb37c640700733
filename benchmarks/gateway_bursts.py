"""Bursts and large inputs at a gateway in front of two replicas of Quill: what is answered, how fast probes are.

    python -m benchmarks.gateway_bursts                                  # all parts
    python -m benchmarks.gateway_bursts --parts bursts --streams 300 2000

    bursts      N streams of 8 tokens at once, through the gateway and then directly at one replica. A 503 comes back
                once, after its `Retry-After`
    bodies      40 bodies of 30 MiB at once
    websocket   16 connections, each with 97 messages of 15 MiB
    names       a model name of 20 MiB, a body of 1,000,000 keys, one of 600,000 messages

Clients are processes of their own, and so is the prober, which asks `/livez` of the gateway; another one asks a bare
socket, whose latencies are those of the machine. RSS is that of the gateway's processes together (replicas excluded).
The exit status is 1 where a bound is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop
import websockets
from tests.e2e.live import LiveServer
from tests.faults.probe import quantile_ms, send_raw

MIB = 2**20
BODY = json.dumps(
    {"model": "quill", "prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True, "stream": True}
).encode()
CLIENT_S = 600.0  # a client that takes longer has lost requests
PROBE_MS, REST_S, REST_MIB = 100.0, 60.0, 256.0  # the bounds
Figures = dict[str, Any]


class Stream(asyncio.Protocol):
    """One request on a connection of its own. ``done`` gets (status, seconds to come back)."""

    def __init__(self, host: str, done: asyncio.Future[tuple[str, float | None]]) -> None:
        self._host, self._done, self._head, self._tail = host, done, b"", b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
        )
        transport.write(head.encode() + BODY)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if len(self._head) < 4096:
            self._head += data
        self._tail = (self._tail + data)[-64:]

    def connection_lost(self, error: Exception | None) -> None:
        head = self._head.partition(b"\r\n\r\n")[0].lower().split(b"\r\n")
        status = head[0].split(b" ")[1].decode() if head[0] else "closed"
        if status == "200" and b"[DONE]" not in self._tail:
            status = "200 broken"
        named = dict(line.split(b": ", 1) for line in head[1:] if b": " in line)
        after = named.get(b"retry-after")
        if not self._done.done():
            self._done.set_result((status, float(after) if after is not None else None))


async def ask(host: str, port: int) -> tuple[str, float | None]:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[str, float | None]] = loop.create_future()
    try:
        await loop.create_connection(lambda: Stream(f"{host}:{port}", done), host, port)
    except OSError as error:
        return type(error).__name__, None
    return await done


async def burst(url: str, num: int) -> Figures:
    """Send ``num`` streams at once; those with `Retry-After` come back once, at that time."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 0
    first, again, without = Counter[str](), Counter[str](), 0
    begin_s = time.monotonic()

    async def one() -> None:
        nonlocal without
        status, after_s = await ask(host, port)
        first[status] += 1
        if status == "503" and after_s is None:
            without += 1
        elif after_s is not None:
            await asyncio.sleep(after_s)
            again[(await ask(host, port))[0]] += 1

    await asyncio.gather(*(one() for _ in range(num)))
    return {
        "first": dict(first),
        "again": dict(again),
        "503_without_retry_after": without,
        "seconds": round(time.monotonic() - begin_s, 1),
    }


def bursting(url: str, num: int, queue: Any) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    queue.put(uvloop.run(burst(url, num)))


def sending(url: str, path: str, body: bytes, queue: Any) -> None:
    try:
        queue.put(str(send_raw(url, path, body)[0]))
    except OSError as error:
        queue.put(type(error).__name__)


async def talk(url: str, num_connections: int, num_messages: int, size: int) -> Figures:
    """Send large messages over each connection, as fast as it takes them, and count the statuses of answers."""
    statuses = Counter[str]()
    filler = "x" * size

    async def one(name: int) -> None:
        address = f"ws{url.removeprefix('http')}/v1/ws"
        left = num_messages
        try:
            async with websockets.connect(address, max_size=None, compression=None, open_timeout=60) as ws:

                async def read() -> None:
                    nonlocal left
                    async for raw in ws:
                        said = json.loads(raw)
                        if "status" in said:
                            statuses[str(said["status"])] += 1
                        if said.get("done"):
                            left -= 1
                            if not left:
                                return

                reading = asyncio.create_task(read())
                for i in range(num_messages):
                    body = json.dumps({"model": "quill", "prompt": filler, "max_tokens": 1})
                    await ws.send(f'{{"id":"{name}-{i}","path":"/v1/completions","body":{body}}}')
                async with asyncio.timeout(CLIENT_S / 4):
                    await reading
        except (OSError, TimeoutError, websockets.WebSocketException) as error:
            statuses[type(error).__name__] += 1
            statuses["unanswered"] += left

    await asyncio.gather(*(one(i) for i in range(num_connections)))
    return {"statuses": dict(statuses)}


def talking(url: str, connections: int, messages: int, size: int, queue: Any) -> None:
    queue.put(asyncio.run(talk(url, connections, messages, size)))


def bare_socket(port: int) -> None:
    """Answer every connection at once, in the simplest way there is."""
    with socket.create_server(("127.0.0.1", port), backlog=1024) as server:
        while True:
            sock, _ = server.accept()
            with sock, suppress(OSError):
                sock.recv(4096)
                sock.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")


class Prober:
    """`/livez` of one URL, asked by a process of its own while the block runs."""

    def __init__(self, url: str) -> None:
        self._command = [sys.executable, "-m", "tests.faults.probe", url]

    def __enter__(self) -> Prober:
        self._popen = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *_: object) -> None:
        said = json.loads(self._popen.communicate("\n", timeout=120)[0])
        found = said["latencies_ms"]
        self.figures = {
            "p50_ms": round(quantile_ms(found, 0.5), 1),
            "p99_ms": round(quantile_ms(found, 0.99), 1),
            "max_ms": round(max(found), 1),
            "num": len(found),
            "failed": said["failed"],
            "statuses": said["statuses"],
        }


def family(pid: int) -> list[int]:
    """Return a process and all below it."""
    found = [pid]
    for each in found:
        with suppress(OSError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def rss_mib(pid: int) -> float:
    total = 0.0
    for each in family(pid):
        with suppress(OSError, IndexError):
            total += (
                int(Path(f"/proc/{each}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB
            )
    return total


class Site:
    """Two replicas behind a gateway, a bare socket beside them."""

    def __init__(self, folder: Path, stack: ExitStack, rest_s: float, flags: list[str]) -> None:
        self.rest_s = rest_s
        serve = ["-m", "quire.cli", "serve", "quill", "--port", "0", *flags]
        self.replicas = [stack.enter_context(running(serve, folder / f"replica{i}")) for i in range(2)]
        config = folder / "gateway.toml"
        tables = "".join(
            f'[[backends]]\nname = "r{i}"\nurl = "{r.url}"\n' for i, r in enumerate(self.replicas)
        )
        config.write_text(
            f'port = 0\nledger = "{folder}/ledger.db"\naccess_log_file = "{folder}/access.log"\n{tables}'
        )
        command = ["-m", "quire.cli", "gateway", "--config", str(config)]
        self.gateway = stack.enter_context(running(command, folder / "gateway.log", r"listening url=(\S+)"))
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        bare = multiprocessing.get_context("spawn").Process(target=bare_socket, args=(port,), daemon=True)
        bare.start()
        stack.callback(bare.terminate)
        self.bare_url = f"http://127.0.0.1:{port}"
        self.books = [folder / "ledger.db", folder / "access.log"]
        for _ in range(300):
            with suppress(OSError):  # it does not listen yet
                if send_raw(self.gateway.url, "/v1/completions", BODY)[0] == 200:
                    break
            time.sleep(0.1)

    def run(self, load: Callable[[], Figures], server: LiveServer | None = None) -> Figures:
        """Run a load at ``server`` (the gateway) with probes beside it; then wait, and look at the memory."""
        server = server or self.gateway
        pid = server.process.pid
        before, most = rss_mib(pid), 0.0
        with Prober(server.url) as probe, Prober(self.bare_url) as bare, watching(pid) as seen:
            time.sleep(0.5)
            found = load()
            time.sleep(0.5)
        most = max(seen)
        time.sleep(self.rest_s)
        memory = {"before": before, "most": most, "after": rss_mib(pid)}
        rss = {name: round(value, 1) for name, value in memory.items()}
        return {**found, "livez": probe.figures, "bare": bare.figures, "rss_mib": rss}


@contextmanager
def running(command: list[str], log: Path, ready: str = r"server ready url=(\S+)") -> Iterator[LiveServer]:
    server = LiveServer(command, log, ready=ready)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def watching(pid: int) -> Iterator[list[float]]:
    """Collect the RSS ten times a second, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_watch, args=(pid, theirs), daemon=True)
    process.start()
    seen: list[float] = [rss_mib(pid)]
    try:
        yield seen
    finally:
        mine.send(None)
        seen.append(mine.recv())
        process.join()


def _watch(pid: int, pipe: Any) -> None:
    most = 0.0
    while not pipe.poll(0.1):
        most = max(most, rss_mib(pid))
    pipe.send(most)


def in_processes(targets: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> list[Any]:
    """Run each target in a process of its own, at once, and return what each puts into the queue."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    children = [context.Process(target=target, args=(*args, queue), daemon=True) for target, args in targets]
    for child in children:
        child.start()
    found = [queue.get(timeout=CLIENT_S) for _ in children]
    for child in children:
        child.join()
    return found


def bursts(site: Site, streams: list[int], show: Callable[[str, Figures], None]) -> None:
    for num in streams:
        found = {}
        for name, server in (("gateway", site.gateway), ("replica", site.replicas[0])):
            url = server.url
            found[name] = site.run(lambda url=url, n=num: in_processes([(bursting, (url, n))])[0], server)  # type: ignore[misc]
            show(f"burst of {num}, {name}", found[name])
        through, direct = (found[name]["first"].get("200", 0) for name in ("gateway", "replica"))
        bad = {k: v for k, v in found["gateway"]["first"].items() if k not in ("200", "503")}
        bad |= {k: v for k, v in found["gateway"]["again"].items() if k != "200"}
        problems = [f"neither 200 nor 503, or not served when back: {bad}"] if bad else []
        if found["gateway"]["503_without_retry_after"]:
            problems.append("a 503 without Retry-After")
        if through < direct:
            problems.append(f"{through} answered at the first try, {direct} directly at one replica")
        show(f"burst of {num}", {"problems": problems + bounds(found["gateway"])})


def bodies(site: Site, num: int, size: int, show: Callable[[str, Figures], None]) -> None:
    body = b'{"model":"quill","max_tokens":1,"prompt":"' + b"x" * size + b'"}'

    def load() -> Figures:
        asked = [(sending, (site.gateway.url, "/v1/completions", body)) for _ in range(num)]
        return {"statuses": dict(Counter(in_processes(asked)))}  # type: ignore[arg-type]

    found = site.run(load)
    show(f"{num} bodies of {size // MIB} MiB", {**found, "problems": bounds(found)})


def websocket(
    site: Site, connections: int, messages: int, size: int, show: Callable[[str, Figures], None]
) -> None:
    args = (site.gateway.url, connections, messages, size)
    found = site.run(lambda: dict(in_processes([(talking, args)])[0]))
    name = f"{connections} WebSocket connections, {messages} messages of {size // MIB} MiB each"
    show(name, {**found, "problems": bounds(found)})


def names(site: Site, show: Callable[[str, Figures], None]) -> None:
    turn = {"role": "user", "content": "hi"}
    inputs = {
        "a model name of 20 MiB": {"model": "m" * (20 * MIB), "prompt": "hi"},
        "1,000,000 keys": {"model": "quill", **{f"k{i}": 1 for i in range(10**6)}},
        "600,000 messages": {"model": "quill", "messages": [turn] * 600_000},
    }
    for name, value in inputs.items():
        path = "/v1/chat/completions" if "messages" in value else "/v1/completions"
        raw = json.dumps(value).encode()
        before = [book.stat().st_size if book.exists() else 0 for book in site.books]
        asked = [(sending, (site.gateway.url, path, raw))]
        found = site.run(lambda a=asked: {"statuses": dict(Counter(in_processes(a)))})  # type: ignore[misc, arg-type]
        grown = sum(book.stat().st_size for book in site.books if book.exists()) - sum(before)
        problems = bounds(found) + ([f"the books grew by {grown} bytes"] if grown > MIB else [])
        show(name, {**found, "books_bytes": grown, "problems": problems})


def bounds(found: Figures) -> list[str]:
    """Return which bounds on probes and memory a load broke."""
    livez, bare, rss = found["livez"], found["bare"], found["rss_mib"]
    problems = []
    if livez["p99_ms"] > max(PROBE_MS, 2 * bare["p99_ms"]) or livez["failed"]:
        problems.append(
            f"probes: p99 {livez['p99_ms']} ms (bare socket {bare['p99_ms']}), {livez['failed']} failed"
        )
    if rss["after"] > rss["before"] + REST_MIB:
        problems.append(f"RSS {rss['before']} MiB before, {rss['after']} after")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", default=["bursts", "bodies", "websocket", "names"])
    parser.add_argument("--streams", nargs="+", type=int, default=[300, 1000, 2000, 5000])
    parser.add_argument("--bodies", nargs=2, type=int, default=[40, 30], help="number, and MiB of each")
    parser.add_argument(
        "--websocket", nargs=3, type=int, default=[16, 97, 15], help="connections, messages, MiB"
    )
    parser.add_argument(
        "--rest", type=float, default=REST_S, help="seconds before the second look at the memory"
    )
    parser.add_argument("--replica", default="", help="flags of the replicas, such as '--max-queue 100'")
    args = parser.parse_args()
    problems = 0

    def show(name: str, figures: Figures) -> None:
        nonlocal problems
        problems += len(figures.get("problems", ()))
        print(f"{name}: {json.dumps(figures)}", flush=True)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        site = Site(Path(folder), stack, args.rest, args.replica.split())
        if "bursts" in args.parts:
            bursts(site, args.streams, show)
        if "bodies" in args.parts:
            bodies(site, args.bodies[0], args.bodies[1] * MIB, show)
        if "websocket" in args.parts:
            websocket(site, args.websocket[0], args.websocket[1], args.websocket[2] * MIB, show)
        if "names" in args.parts:
            names(site, show)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())

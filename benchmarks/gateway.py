"""The gateway on one core: added latency, requests/s, streamed chunks/s, large prompts, memory, and the router alone.

    python -m benchmarks.gateway            # all parts; --parts short,streams picks some

Client and backend are bare asyncio protocols on another core (`taskset`-like, by affinity), so that the gateway is what
limits. Latencies are beside those of the same client directly at the same backend, in turns. The gateway runs with a
key, a limit and a ledger (SQLite) unless --plain. The CPU seconds of its process are printed beside every rate: on a
shared machine they say more than the rate does.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from quire.cache.events import BlockStored
from quire.gateway.digest import digests, root_of
from quire.gateway.routing import Demand, Router

ANSWER = (
    b'{"id":"c-1","object":"text_completion","model":"m","choices":[{"index":0,"text":"hi","finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":9,"completion_tokens":1}}'
)
END = (
    b'data: {"id":"c-1","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":100}}\n\ndata: [DONE]\n\n'
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKS, GAP_S = 100, 0.02  # of a stream


Pool = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Backend(asyncio.Protocol):
    """Answers every POST at once; a stream has `CHUNKS` events, each with the time at which it was sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.rest = transport, b""  # type: ignore[assignment]  # uvloop's is no asyncio.Transport

    def data_received(self, data: bytes) -> None:
        self.rest += data
        while (end := self.rest.find(b"\r\n\r\n")) >= 0:
            head = self.rest[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r", 1)[0]) if at >= 0 else 0
            if len(self.rest) < end + 4 + size:
                return
            body, self.rest = self.rest[end + 4 : end + 4 + size], self.rest[end + 4 + size :]
            if b'"stream":true' in body:
                asyncio.get_running_loop().create_task(self.stream())
            else:
                self.transport.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(ANSWER), ANSWER)
                )

    async def stream(self) -> None:
        self.transport.write(STREAM_HEAD)
        await asyncio.sleep(random.random() * GAP_S)
        for _ in range(CHUNKS):
            event = (
                b'data: {"id":"c-1","choices":[{"index":0,"text":"word "}],"t":%.6f}\n\n' % time.monotonic()
            )
            self.transport.write(chunked(event))
            await asyncio.sleep(GAP_S)
        self.transport.write(chunked(END) + b"0\r\n\r\n")


async def _serve_backend(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


def backend(port: int, core: int) -> None:
    os.sched_setaffinity(0, {core})
    uvloop.run(_serve_backend(port))


@dataclass
class Result:
    """What one run of the client saw; seconds."""

    first_s: list[float] = field(default_factory=list)  # to the first byte, by request
    chunk_s: list[float] = field(default_factory=list)  # from the backend to the client, by chunk
    num_failed: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0  # of the gateway


def request(prompt_bytes: int, streams: bool, key: str) -> bytes:
    text = "once upon a time " * (prompt_bytes // 17 + 1)
    body = b'{"model":"m","prompt":"%b","max_tokens":16%b}' % (
        text[:prompt_bytes].encode(), b',"stream":true' if streams else b"",
    )  # fmt: skip
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b" % (key.encode(), len(body), body)
    )


async def ask(port: int, message: bytes, result: Result, pool: Pool) -> None:
    """Send one request on a connection of the pool and read its answer to the end."""
    reader, writer = pool.pop() if pool else await asyncio.open_connection("127.0.0.1", port)
    begin_s = time.monotonic()
    writer.write(message)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        result.num_failed += 1
        writer.close()
        return
    at = head.find(b"content-length:")
    if at >= 0:
        result.first_s.append(time.monotonic() - begin_s)
        await reader.readexactly(int(head[at + 15 :].split(b"\r", 1)[0]))
    else:
        rest, is_first = b"", True
        while not rest.endswith(b"0\r\n\r\n"):
            data = await reader.read(65536)
            now = time.monotonic()
            if is_first:
                result.first_s.append(now - begin_s)
                is_first = False
            rest = (rest + data)[-400:] if b'"t":' not in data else data
            for piece in data.split(b'"t":')[1:]:
                stamp = piece.split(b"}", 1)[0]
                if len(stamp) > 6 and b"}" in piece:
                    result.chunk_s.append(now - float(stamp))
    pool.append((reader, writer))


async def closed_loop(port: int, message: bytes, at_once: int, num: int) -> Result:
    """``at_once`` clients, each with its next request behind its last."""
    result, left = Result(), num

    async def client() -> None:
        nonlocal left
        pool: Pool = []
        while left > 0:
            left -= 1
            await ask(port, message, result, pool)
        for _, writer in pool:
            writer.close()

    await asyncio.gather(*(client() for _ in range(at_once)))
    return result


async def open_loop(port: int, message: bytes, rate: float, num: int) -> Result:
    """Poisson arrivals at ``rate`` per second."""
    result, rng, tasks = Result(), random.Random(7), []
    pool: Pool = []
    due_s = time.monotonic()
    for _ in range(num):
        due_s += rng.expovariate(rate)
        await asyncio.sleep(max(due_s - time.monotonic(), 0))
        tasks.append(asyncio.create_task(ask(port, message, result, pool)))
    await asyncio.gather(*tasks)
    for _, writer in pool:
        writer.close()
    return result


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


class Bench:
    """A backend and a gateway, each on its core."""

    def __init__(self, plain: bool, folder: Path) -> None:
        self.port, self.direct, self.key = 9102, 9101, "sk-bench"
        config = folder / "gateway.toml"
        books = f'api_keys = ["{self.key}"]\nledger = "{folder}/ledger.db"\n[limits]\nrequests_per_minute = 100000000\n'
        config.write_text(
            f"port = {self.port}\n{'' if plain else books}"
            f'[[backends]]\nname = "b"\nurl = "http://127.0.0.1:{self.direct}"\nmodels = ["m"]\n'
        )
        self.process = multiprocessing.get_context("spawn").Process(
            target=backend, args=(self.direct, 1), daemon=True
        )
        self.process.start()
        command = [sys.executable, "-m", "quire.cli", "gateway", "--config", str(config)]
        self.gateway = subprocess.Popen(command, stderr=(folder / "log").open("w"))
        os.sched_setaffinity(self.gateway.pid, {0})
        os.sched_setaffinity(0, {1})

    def run(self, load: Callable[[int], Awaitable[Result]]) -> tuple[Result, Result]:
        """Run a load directly at the backend and through the gateway."""
        results = []
        for port in (self.direct, self.port):
            before, begin_s = cpu_s(self.gateway.pid), time.monotonic()
            result = uvloop.run(load(port))  # type: ignore[arg-type]
            result.seconds, result.cpu_s = time.monotonic() - begin_s, cpu_s(self.gateway.pid) - before
            results.append(result)
        return results[0], results[1]

    def wait(self) -> None:
        message = request(10, False, self.key)
        for _ in range(200):
            try:
                if not uvloop.run(closed_loop(self.port, message, 1, 1)).num_failed:
                    return
            except (OSError, asyncio.IncompleteReadError):
                pass
            time.sleep(0.1)
        raise SystemExit("the gateway never became ready")

    def close(self) -> None:
        self.gateway.terminate()
        self.gateway.wait(20)
        self.process.terminate()


def ms(values: list[float], share: float) -> float:
    return 1e3 * sorted(values)[min(int(len(values) * share), len(values) - 1)]


def latency(bench: Bench) -> None:
    direct, through = bench.run(lambda port: open_loop(port, request(500, False, bench.key), 200, 4000))
    added = [ms(through.first_s, share) - ms(direct.first_s, share) for share in (0.5, 0.99)]
    print(f"latency: 200 requests/s: added p50 {added[0]:.2f} ms, p99 {added[1]:.2f} ms to the first byte")


def large(bench: Bench) -> None:
    direct, through = bench.run(lambda port: open_loop(port, request(200_000, False, bench.key), 50, 500))
    added = [ms(through.first_s, share) - ms(direct.first_s, share) for share in (0.5, 0.99)]
    print(
        f"large: 200 KB prompts at 50/s: added p50 {added[0]:.2f} ms, p99 {added[1]:.2f} ms; "
        f"{1e3 * through.cpu_s / 500:.2f} ms of CPU each"
    )


def short(bench: Bench) -> None:
    for at_once in (1, 32):
        num = 8000 if at_once > 1 else 1500
        _, through = bench.run(
            lambda port, n=num, a=at_once: closed_loop(port, request(500, False, bench.key), a, n)
        )
        rate, cost = num / through.seconds, through.cpu_s / num
        print(f"short: {at_once} at once: {rate:.0f} requests/s, {1e6 * cost:.0f} µs of CPU each "
              f"({1 / cost:.0f} per CPU second), {through.num_failed} failed")  # fmt: skip


def streams(bench: Bench) -> None:
    at_once = 300  # times 50 chunks per second each
    direct, through = bench.run(
        lambda port: closed_loop(port, request(500, True, bench.key), at_once, at_once * 3)
    )
    num = len(through.chunk_s)
    added = [ms(through.chunk_s, share) - ms(direct.chunk_s, share) for share in (0.5, 0.99)]
    cost = through.cpu_s / num
    print(
        f"streams: {at_once} at once: {num / through.seconds:.0f} chunks/s "
        f"(directly {len(direct.chunk_s) / direct.seconds:.0f}), "
        f"added p50 {added[0]:.2f} ms, p99 {added[1]:.2f} ms; {1e6 * cost:.0f} µs of CPU each "
        f"({1 / cost:.0f} per CPU second)"
    )


def memory(bench: Bench) -> None:
    before = resident_mib(bench.gateway.pid)
    most = 0.0

    async def load() -> None:
        nonlocal most
        task = asyncio.create_task(closed_loop(bench.port, request(500, True, bench.key), 2000, 2000))
        while not task.done():
            most = max(most, resident_mib(bench.gateway.pid))
            await asyncio.sleep(0.1)

    uvloop.run(load())
    print(f"memory: {before:.0f} MiB at rest, {most:.0f} MiB with 2,000 open streams")


def router() -> None:
    """64 replicas that hold 1 M pieces in all; requests of 200 KB that share half of their text with what was sent."""
    num, pieces, capacity = 64, 1_000_000, 1 << 14
    before = resident_mib(os.getpid())
    made = Router("prefix-predicted", num, capacity=capacity)
    rng = random.Random(3)
    for i in range(pieces // 200):
        chain = [rng.randbytes(16) for _ in range(200)]
        made.prefixes.sent(i % num, chain)
    held = resident_mib(os.getpid()) - before
    text = rng.randbytes(200 * 1024)
    begin = time.perf_counter()
    for _ in range(50):
        chain = digests(root_of("m", ""), text, 1024)
    digest_us = 1e6 * (time.perf_counter() - begin) / 50
    made.route("first", Demand(chain, 50_000))
    times = []
    for i in range(400):
        demand = Demand([*chain[:100], *(rng.randbytes(16) for _ in range(100))], 50_000)
        begin = time.perf_counter()
        made.route(str(i), demand)
        times.append(time.perf_counter() - begin)
    print(
        f"router: {num} replicas, {pieces} pieces: "
        f"p50 {1e6 * sorted(times)[200]:.0f} µs, p99 {1e6 * sorted(times)[396]:.0f} µs "
        f"per decision; digests of 200 KB {digest_us:.0f} µs; {held * 2**20 / pieces:.0f} bytes per piece"
    )


def reported() -> None:
    """64 replicas that report 1 M blocks in all, 16 in each piece of text; half of each prompt is known."""
    num, blocks = 64, 1_000_000
    before = resident_mib(os.getpid())
    made = Router("prefix-hybrid", num, of_text=True)
    names = made.prefixes.names
    assert names is not None
    rng, known = random.Random(3), []
    begin = time.perf_counter()
    for i in range(blocks // 3200):
        hashes = [rng.randbytes(16) for _ in range(3200)]
        made.prefixes.report(i % num, [BlockStored(each, b"", (), (0,)) for each in hashes])
        known.append([rng.randbytes(16) for _ in range(200)])
        names.learn(known[-1], hashes[15::16])
    event_us = 1e6 * (time.perf_counter() - begin) / blocks
    held, times = resident_mib(os.getpid()) - before, []
    for i in range(400):
        chain = [*known[i % len(known)][:100], *(rng.randbytes(16) for _ in range(100))]
        begin = time.perf_counter()
        made.route(str(i), Demand(chain, 50_000))
        times.append(time.perf_counter() - begin)
    print(
        f"reported: {num} replicas, {blocks} blocks: "
        f"p50 {1e6 * sorted(times)[200]:.0f} µs, p99 {1e6 * sorted(times)[396]:.0f} µs "
        f"per decision; {event_us:.1f} µs per event; {held * 2**20 / blocks:.0f} bytes per block"
    )


PARTS: dict[str, Callable[[Bench], None]] = {
    "latency": latency, "short": short, "streams": streams, "large": large, "memory": memory,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="router,reported," + ",".join(PARTS))
    parser.add_argument("--plain", action="store_true", help="without key, limit and ledger")
    args = parser.parse_args()
    wanted = args.parts.split(",")
    if "router" in wanted:
        router()
    if "reported" in wanted:
        reported()
    wanted = [name for name in wanted if name in PARTS]
    if not wanted:
        return
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.plain, Path(folder))
        try:
            bench.wait()
            for name in wanted:
                PARTS[name](bench)
        finally:
            bench.close()


if __name__ == "__main__":
    main()

"""The gateway on one core: added latency, requests/s, streamed chunks/s, large prompts, memory, and the router alone.

    python -m benchmarks.gateway            # all parts; --parts short,streams picks some
    python -m benchmarks.gateway --parts beside --litellm VENV/bin/litellm      # LiteLLM's proxy beside it

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
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from quire.cache.events import BlockStored
from quire.text.digest import digests, root_of
from quire_gateway.routing import Demand, Router

ANSWER = (
    b'{"id":"c-1","object":"text_completion","model":"m","choices":[{"index":0,"text":"hi","finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":9,"completion_tokens":1}}'
)
END = (
    b'data: {"id":"c-1","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":100}}\n\ndata: [DONE]\n\n'
)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKS, GAP_S = 100, 0.02  # of a stream
PHASES = 10  # into which the streams are divided, so that they do not all write at once
CHAT_ANSWER = (
    b'{"id":"c-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"hi"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":1,"total_tokens":10}}'
)


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
                self.transport.write(STREAM_HEAD)
                TICKER.add(self.transport)
            else:
                answer = CHAT_ANSWER if b" /v1/chat/" in head else ANSWER
                self.transport.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                    % (len(answer), answer)
                )


class Ticker:
    """Writes the events of all streams. Its times are absolute, so that a late tick makes no later one late."""

    def __init__(self) -> None:
        self._streams: list[list[list[object]]] = [
            [] for _ in range(PHASES)
        ]  # by phase: [transport, events left]
        self._num = 0
        self._tick = 0

    def add(self, transport: object) -> None:
        self._streams[self._num % PHASES].append([transport, CHUNKS])
        self._num += 1

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begin_s = self._loop.time()
        self._loop.call_soon(self._run)

    def _run(self) -> None:
        event = chunked(
            b'data: {"id":"c-1","choices":[{"index":0,"text":"word "}],"t":%.6f}\n\n' % time.monotonic()
        )
        streams = self._streams[self._tick % PHASES]
        for stream in streams:
            stream[1] -= 1  # type: ignore[operator]
            stream[0].write(event if stream[1] >= 0 else chunked(END) + b"0\r\n\r\n")  # type: ignore
        streams[:] = [stream for stream in streams if stream[1] >= 0]  # type: ignore[operator]
        self._tick += 1
        self._loop.call_at(self._begin_s + self._tick * GAP_S / PHASES, self._run)


TICKER = Ticker()


async def _serve_backend(port: int) -> None:
    TICKER.start()
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
    num_chunks: int = 0
    num_failed: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0  # of the gateway


def chat(key: str) -> bytes:
    body = b'{"model":"m","messages":[{"role":"user","content":"%b"}],"max_tokens":16}' % (
        b"once upon a time " * 30
    )
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n%b" % (key.encode(), len(body), body)
    )


class StreamClient(asyncio.Protocol):
    """One request after another on a connection; of the events that come together the first one's time is taken."""

    def __init__(self, message: bytes, num: int, result: Result, done: asyncio.Future[None]) -> None:
        self._message, self._left, self._result, self._done = message, num, result, done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        self._tail, self._begin_s, self._is_first = b"", time.monotonic(), True
        self._left -= 1
        self._transport.write(self._message)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        now, result = time.monotonic(), self._result
        if self._is_first:
            self._is_first = False
            result.first_s.append(now - self._begin_s)
            result.num_failed += not data[:12].endswith(b"200")
        if (num := data.count(b'"t":')) > 0:
            at = data.find(b'"t":') + 4
            stamp = data[at : at + 24].partition(b"}")
            result.num_chunks += num
            if stamp[1]:
                result.chunk_s.append(now - float(stamp[0]))
        self._tail = (self._tail + data)[-5:] if len(data) < 5 else data[-5:]
        if self._tail == b"0\r\n\r\n":
            if self._left > 0:
                self._ask()
            else:
                self._transport.close()
                self._done.set_result(None)


async def stream_loop(port: int, message: bytes, at_once: int, each: int) -> Result:
    """``at_once`` connections with ``each`` streams, one after the other."""
    loop, result = asyncio.get_running_loop(), Result()
    ends: list[asyncio.Future[None]] = [loop.create_future() for _ in range(at_once)]
    for end in ends:
        await loop.create_connection(
            lambda end=end: StreamClient(message, each, result, end), "127.0.0.1", port
        )  # type: ignore[misc]
    await asyncio.gather(*ends)
    return result


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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Bench:
    """A backend and a gateway, each on its core."""

    def __init__(self, plain: bool, folder: Path, litellm: Path | None = None) -> None:
        self.folder, self.litellm = folder, litellm
        self.scale = 1.0
        self.port, self.direct, self.key = free_port(), free_port(), "sk-bench"
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

    def scaled(self, num: int) -> int:
        """Return a number of requests of a part, times --scale."""
        return max(20, int(num * self.scale))

    def wait(self, port: int, message: bytes, tries: int = 300) -> None:
        """Ask once every tenth of a second until an answer comes."""
        for _ in range(tries):
            try:
                if not uvloop.run(closed_loop(port, message, 1, 1)).num_failed:
                    return
            except (OSError, asyncio.IncompleteReadError):
                pass
            time.sleep(0.1)
        raise SystemExit(f"what listens on port {port} never became ready")

    def close(self) -> None:
        self.gateway.terminate()
        self.gateway.wait(20)
        self.process.terminate()


def ms(values: list[float], share: float) -> float:
    return 1e3 * sorted(values)[min(int(len(values) * share), len(values) - 1)]


def latency(bench: Bench) -> None:
    num = bench.scaled(4000)
    direct, through = bench.run(lambda port: open_loop(port, request(500, False, bench.key), 200, num))
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
        num = bench.scaled(8000 if at_once > 1 else 1500)
        _, through = bench.run(
            lambda port, n=num, a=at_once: closed_loop(port, request(500, False, bench.key), a, n)
        )
        rate, cost = num / through.seconds, through.cpu_s / num
        print(f"short: {at_once} at once: {rate:.0f} requests/s, {1e6 * cost:.0f} µs of CPU each "
              f"({1 / cost:.0f} per CPU second), {through.num_failed} failed")  # fmt: skip


def streams(bench: Bench) -> None:
    at_once = bench.scaled(400)  # times 50 chunks per second each
    direct, through = bench.run(lambda port: stream_loop(port, request(500, True, bench.key), at_once, 3))
    num = through.num_chunks
    added = [ms(through.chunk_s, share) - ms(direct.chunk_s, share) for share in (0.5, 0.99)]
    cost = through.cpu_s / num
    print(
        f"streams: {at_once} at once: {num / through.seconds:.0f} chunks/s "
        f"(directly {direct.num_chunks / direct.seconds:.0f}), "
        f"added p50 {added[0]:.2f} ms, p99 {added[1]:.2f} ms; {1e6 * cost:.0f} µs of CPU each "
        f"({1 / cost:.0f} per CPU second), {through.num_failed} failed"
    )


def beside(bench: Bench) -> None:
    """LiteLLM's proxy and the gateway in turns, on the same core and the same backend: short chats, 16 at once."""
    if bench.litellm is None:
        print("beside: give --litellm VENV/bin/litellm (pip install 'litellm[proxy]' in a venv of its own)")
        return
    port, message, rounds = free_port(), chat(bench.key), 3
    with litellm(bench, port) as process:
        found: dict[str, list[Result]] = {"gateway": [], "LiteLLM": []}
        for _ in range(rounds):
            for name, at, pid, num in (
                ("gateway", bench.port, bench.gateway.pid, bench.scaled(2000)),
                ("LiteLLM", port, process.pid, bench.scaled(300)),
            ):  # fmt: skip
                before, begin_s = cpu_s(pid), time.monotonic()
                result = uvloop.run(closed_loop(at, message, 16, num))
                result.seconds, result.cpu_s = time.monotonic() - begin_s, cpu_s(pid) - before
                found[name].append(result)
    rates, costs = {}, {}
    for name, results in found.items():
        first = [each for result in results for each in result.first_s]
        rates[name] = statistics.median(len(r.first_s) / r.seconds for r in results)
        costs[name] = sum(r.cpu_s for r in results) / len(first)
        print(f"beside: {name}: {rates[name]:.0f} requests/s (median of {rounds} runs), p50 {ms(first, 0.5):.1f} ms, "
              f"p99 {ms(first, 0.99):.1f} ms, {1e3 * costs[name]:.2f} ms of CPU each, "
              f"{sum(r.num_failed for r in results)} failed")  # fmt: skip
    print(f"beside: {rates['gateway'] / rates['LiteLLM']:.1f} times its requests/s, "
          f"{costs['LiteLLM'] / costs['gateway']:.1f} times less CPU each")  # fmt: skip


@contextmanager
def litellm(bench: Bench, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run LiteLLM's proxy on the gateway's core, with a key and without its database, until the block ends."""
    config = bench.folder / "litellm.yaml"
    config.write_text(
        f"model_list:\n  - model_name: m\n    litellm_params: {{model: openai/m, api_key: none, "
        f'api_base: "http://127.0.0.1:{bench.direct}/v1"}}\n'
        f"general_settings: {{master_key: {bench.key}}}\nlitellm_settings: {{telemetry: false}}\n"
    )
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
    command = [str(bench.litellm), "--config", str(config), "--port", str(port), "--num_workers", "1"]
    process = subprocess.Popen(
        command, env=environment, stdout=(bench.folder / "litellm.log").open("w"), stderr=subprocess.STDOUT
    )
    os.sched_setaffinity(process.pid, {0})
    try:
        bench.wait(port, chat(bench.key), 1800)
        yield process
    finally:
        process.terminate()
        process.wait(20)


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
    """64 replicas report 1 M blocks in all (`prefix-hybrid`); half of each prompt of 200 pieces is known."""
    num, blocks = 64, 1_000_000
    before = resident_mib(os.getpid())
    made, rng = Router("prefix-hybrid", num, capacity=1 << 14, of_text=True), random.Random(3)
    for i in range(blocks // 1000):
        hashes = [rng.randbytes(16) for _ in range(1000)]
        made.prefixes.report(i % num, [BlockStored(each, b"", (), (0,)) for each in hashes])
    held = resident_mib(os.getpid()) - before
    known = [rng.randbytes(16) for _ in range(100)]
    assert made.prefixes.names is not None
    made.prefixes.names.learn(known, hashes[:100])
    for r in range(num):  # each has its own pace, and requests in flight
        made.ttft.observe(r, 1000, 0.1 + 0.001 * r)
    for i in range(4 * num):
        made.route(f"before{i}", Demand([rng.randbytes(16) for _ in range(20)], 5_000))
    times, cpu = [], 0.0
    for i in range(400):
        demand = Demand([*known, *(rng.randbytes(16) for _ in range(100))], 50_000)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        made.route(str(i), demand)
        times.append(time.perf_counter() - begin)
        cpu += time.process_time() - begin_cpu
        made.finished(str(i))
    print(
        f"reported: {num} replicas, {blocks} blocks: p50 {1e6 * sorted(times)[200]:.0f} µs, "
        f"p99 {1e6 * sorted(times)[396]:.0f} µs per decision, {1e6 * cpu / 400:.0f} µs of CPU; "
        f"{held * 2**20 / blocks:.0f} bytes per block"
    )


PARTS: dict[str, Callable[[Bench], None]] = {
    "latency": latency, "short": short, "streams": streams, "large": large, "memory": memory,
    "beside": beside,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="router,reported," + ",".join(PARTS))
    parser.add_argument("--plain", action="store_true", help="without key, limit and ledger")
    parser.add_argument("--litellm", type=Path, help="the program of LiteLLM's proxy, for the part 'beside'")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the requests of latency … beside")
    args = parser.parse_args()
    wanted = args.parts.split(",")
    if "router" in wanted:
        router()
    if "reported" in wanted:
        reported()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.plain, Path(folder), args.litellm)
        bench.scale = args.scale
        try:
            bench.wait(bench.port, request(10, False, bench.key))
            for name in wanted:
                if name not in ("router", "reported"):
                    PARTS[name](bench)
        finally:
            bench.close()


if __name__ == "__main__":
    main()

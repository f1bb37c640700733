"""Whether the ledger's sums are the engines' own, with every gateway killed once.

    python -m benchmarks.conservation            # --requests 600 --timed: in a minute

    20,000 requests  ──>  3 gateways, each killed by -9 once  ──>  2 replicas
                            │
                            └── one PostgreSQL (ledger), one Redis (limits), both real and started here

Clients ask in two dialects, streamed and not, by four keys of three tenants; some leave in mid-stream. A request whose
gateway dies is asked again at another one, so the engines compute more than the clients get: the ledger must have that
too. At the end the sums of ``quire ledger report`` are compared with the counters of the replicas' ``/metrics``. With
``--timed`` the replicas have no model: their steps sleep, everything else is real.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from tests.e2e.live import ROOT, LiveServer
from tests.gateway.services import free_port, postgres_server, redis_server, wait_until

from quire.cost.cost_model import CostModel
from quire.http.keys import ApiKey, create_key

KEY = "between-us"
WORKERS = 48
PREAMBLE = (
    "You are a friendly helper. You answer in short words that a child can read. " * 3
)  # in the cache, mostly
LEAVES = 0.02  # share of the clients that leave in mid-stream
COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "cached_tokens": "vllm:prompt_tokens_cached_total",
    "output_tokens": "vllm:generation_tokens_total",
}


@dataclass
class Gateway:
    """A gateway process with a folder of its own."""

    config: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "quire.cli", "gateway", "--config", str(self.config)]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        with (self.config.parent / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.config.parent, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )

    def end(self, sign: int) -> None:
        if self.process is not None:
            self.process.send_signal(sign)
            self.process.wait(60)
            self.process = None


def make_gateway(folder: Path, backends: list[str], ledger: str, redis: str, keys: Path) -> Gateway:
    folder.mkdir()
    port, config = free_port(), folder / "gateway.toml"
    lines = [f"port = {port}", f'gateway_key = "{KEY}"', f'ledger = "{ledger}"', f'redis = "{redis}"']
    lines += [
        f'key_file = "{keys}"',
        "[limits]",
        "tokens_per_day = 1_000_000_000",
        "[health]",
        "interval_s = 0.5",
    ]
    lines += ["[timeouts]", "first_token_s = 120.0"]
    for number, url in enumerate(backends):
        lines += ["[[backends]]", f'name = "r{number}"', f'url = "{url}"']
    config.write_text("\n".join(lines))
    return Gateway(config, port)


@dataclass
class Clients:
    """Asks until ``wanted`` requests have been answered."""

    gateways: list[Gateway]
    keys: list[str]
    wanted: int
    counts: Counter[str] = field(default_factory=Counter)

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            killing = asyncio.create_task(self._kill())
            await asyncio.gather(*(self._work(session, Random(number)) for number in range(WORKERS)))
            await killing

    async def _kill(self) -> None:
        """Kill each gateway once, at equal distances, and start it again."""
        for number, gateway in enumerate(self.gateways):
            while self.counts["answered"] < self.wanted * (number + 1) // (len(self.gateways) + 1):
                await asyncio.sleep(0.02)
            gateway.end(signal.SIGKILL)
            self.counts["kills"] += 1
            await asyncio.sleep(0.5)
            gateway.start()

    async def _work(self, session: aiohttp.ClientSession, random: Random) -> None:
        while self.counts["answered"] + self.counts["left"] < self.wanted:
            path, body, leaves = _request(random)
            headers = {"authorization": f"Bearer {random.choice(self.keys)}"}
            url = random.choice(self.gateways).url + path
            try:
                async with session.post(url, json=body, headers=headers) as response:
                    if response.status != 200:
                        self.counts[f"status {response.status}"] += 1
                        await asyncio.sleep(0.1)
                    elif leaves:
                        await response.content.readany()
                        response.close()
                        self.counts["left"] += 1
                    else:
                        await response.read()
                        self.counts["answered"] += 1
            except (aiohttp.ClientError, ConnectionError):
                self.counts["broken"] += 1  # by the kill of its gateway
                await asyncio.sleep(0.1)


def _request(random: Random) -> tuple[str, dict[str, Any], bool]:
    text = " ".join(
        random.choice(("the", "cat", "sat", "on", "a", "mat", "and")) for _ in range(random.randrange(60))
    )
    streams = random.random() < 0.5
    body: dict[str, Any] = {"model": "quill", "max_tokens": random.randrange(1, 24), "stream": streams}
    body |= {"ignore_eos": True, "n": random.choice((1, 1, 1, 2))}
    leaves = streams and random.random() < LEAVES
    if random.random() < 0.5:
        return "/v1/completions", body | {"prompt": PREAMBLE + text}, leaves
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": PREAMBLE + text}]}, leaves


def start_replica(folder: Path, *, timed: bool) -> LiveServer:
    folder.mkdir()
    if timed:
        (folder / "cost.json").write_text(json.dumps(CostModel(fixed_s=0.002).to_json()))
        flags = [f"gateway_key={KEY}", "max_model_len=512", "max_num_seqs=64"]
        command = ["-m", "tests.sim.serve_timed", str(folder / "cost.json"), *flags]
        return LiveServer(command, folder / "log", ready=r"ready +on (\S+)")
    flags = ["--port", str(free_port()), "--threads", "1", "--gateway-key", KEY, "--max-num-seqs", "64"]
    return LiveServer(["-m", "quire.cli", "serve", "quill", *flags], folder / "log")


def report(ledger: str, *, by: str = "") -> list[dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "quire.cli",
        "ledger",
        "report",
        "--ledger",
        ledger,
        "--by",
        by,
        "--format",
        "json",
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    return list(json.loads(done.stdout))


def conservation(num_requests: int, num_gateways: int, num_replicas: int, *, timed: bool) -> dict[str, Any]:
    """Run it; return the counts of the clients, the engines and the ledger."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="quire-conservation-")))
        ledger = stack.enter_context(postgres_server()).url
        redis = stack.enter_context(redis_server()).url
        now, file = datetime.now(UTC), folder / "keys"
        tenants = {"alice": "lab", "bob": "lab", "carol": "shop", "dave": "home"}
        keys = [create_key(file, ApiKey(key, tenant, "", created=now)) for key, tenant in tenants.items()]
        replicas = [
            stack.enter_context(start_replica(folder / f"r{i}", timed=timed)) for i in range(num_replicas)
        ]
        urls = [each.url for each in replicas]
        gateways = [make_gateway(folder / f"g{i}", urls, ledger, redis, file) for i in range(num_gateways)]
        for gateway in gateways:
            stack.callback(gateway.end, signal.SIGKILL)
            gateway.start()
        for gateway in gateways:
            wait_until(lambda url=gateway.url: _is_ready(url), "the start of a gateway")  # type: ignore[misc]
        clients = Clients(gateways, keys, num_requests)
        begin_s = time.monotonic()
        asyncio.run(clients.run())
        seconds = time.monotonic() - begin_s
        time.sleep(13.0)  # the last gateway has read the replicas' records for the last time
        engines = {
            name: sum(int(each.metric(metric)) for each in replicas) for name, metric in COUNTERS.items()
        }
        for gateway in gateways:
            gateway.end(signal.SIGTERM)
        outcomes = {line["outcome"]: line["requests"] for line in report(ledger, by="outcome")}
        return {
            "clients": dict(clients.counts), "seconds": round(seconds, 1), "engines": engines,
            "ledger": report(ledger)[0], "outcomes": outcomes, "tenants": report(ledger, by="tenant"),
        }  # fmt: skip


def _is_ready(url: str) -> bool:
    done = subprocess.run(["curl", "-s", "-m", "2", f"{url}/readyz"], capture_output=True, text=True)
    return re.search('"ready"', done.stdout) is not None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--gateways", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--timed", action="store_true", help="replicas without a model")
    args = parser.parse_args()
    found = conservation(args.requests, args.gateways, args.replicas, timed=args.timed)
    print(json.dumps(found, indent=2))
    equal = all(found["engines"][name] == found["ledger"][name] for name in COUNTERS)
    print("equal" if equal and not found["ledger"]["unsettled"] else "DIFFERENT")
    return not equal


if __name__ == "__main__":
    sys.exit(main())

"""Admission under overload: 0.9, 1.5 and 3 × the sustainable rate, simulated by seed, or live on Quill.

    python benchmarks/overload.py [--seeds 1,2,3]
    python benchmarks/overload.py --live [--seconds 12] [--rounds 3]     a server of Quill with one thread, 4 minutes
    python benchmarks/overload.py --live --timed                         the same without a model

For each load: requests, admitted, p50 and p99 TTFT of the admitted ones, and goodput (requests that ended within the
run, per second). Simulated, each rejected client also comes back once after the time it was told: how many are served?
Live, the sustainable rate is measured before each round: completions per second of a closed loop with all seats taken.
The limit ``--max-ttft-ms`` is 1.5 times the p99 at 0.9 of that rate, in 0.1 to 2 s. The loads of a round follow each
other, so a machine that gets slower shifts them together. Quantiles are of all rounds; medians of rounds are beside.
With ``--timed`` steps sleep as long as a cost model says and everything else is real, so that the pace is the same on a
machine that does other work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import aiohttp
import numpy as np
from slo_live import free_port
from slo_live import server as quill_server

from quire.config import CacheConfig, SchedulerConfig
from quire.cost.cost_model import CostModel, Curve
from quire_lab.bench.summary import RequestRecord
from quire_lab.sim.replica import ClusterConfig
from quire_lab.sim.run import simulate
from quire_lab.workload.build import Synthetic
from quire_lab.workload.distributions import Arrivals, Uniform

ROOT = Path(__file__).resolve().parents[1]
LOADS = (0.9, 1.5, 3.0)
HEAD = "| load | requests | admitted | TTFT p50 s | TTFT p99 s | goodput/s |\n|---|---|---|---|---|---|"


@dataclass(slots=True)
class Row:
    """One request: when it was sent, its first token and its end (seconds of the run); status 200 if it was served."""

    sent_s: float
    first_s: float
    end_s: float
    status: int
    retry_after_s: float = 0.0


def show(load: float, rows: Sequence[Row], duration_s: float) -> tuple[float, float]:
    """Print a row; return p99 TTFT and goodput."""
    done = [row for row in rows if row.status == 200]
    p50, p99 = map(float, np.percentile([row.first_s - row.sent_s for row in done], (50, 99)))
    good = sum(row.end_s <= duration_s for row in done) / duration_s
    print(f"| {load:g} | {len(rows)} | {len(done)} | {p50:.2f} | {p99:.2f} | {good:.2f} |", flush=True)
    return p99, good


def verdict(found: dict[float, tuple[float, float]]) -> str:
    peak = max(good for _, good in found.values())
    p99, good = found[LOADS[-1]]
    below, _ = found[LOADS[0]]
    return f"p99 TTFT at 3 ×: {p99 / below:.2f} × that at 0.9 ×; goodput {good / peak:.0%} of its peak\n"


# -- simulated --

STEP = CostModel(fixed_s=0.020, rows=Curve((1.0, 1025.0), (0.0, 0.400)))
TIMED_STEP = CostModel(fixed_s=0.008, rows=Curve((1.0, 257.0), (0.0, 0.025)))  # with --timed
SUSTAINABLE, SECONDS = 4.7, 200


def simulated(load: float, seed: int, retries: int = 0) -> tuple[RequestRecord, ...]:
    rate = load * SUSTAINABLE
    made = Synthetic(int(rate * SECONDS), Uniform(20, 400), Uniform(10, 150), Arrivals(rate)).build(seed)
    scheduler = SchedulerConfig(
        max_num_seqs=16, max_num_batched_tokens=256, max_model_len=1024, max_ttft_s=3.0
    )
    cluster = ClusterConfig(scheduler, CacheConfig(num_blocks=4096, model_key="sim"), retries=retries)
    return simulate(cluster, STEP, made).records


def simulate_all(seeds: Sequence[int]) -> None:
    for seed in seeds:
        print(f"Simulated, seed {seed}, {SUSTAINABLE} requests/s sustainable, max_ttft_ms 3000\n\n{HEAD}")
        found = {}
        for load in LOADS:
            records = simulated(load, seed)
            rows = [
                Row(r.sent_s, r.first_token_s or 0.0, r.end_s, 200 if r.status == "ok" else 503)
                for r in records
            ]
            found[load] = show(load, rows, max(r.arrival_s for r in records))
        print(f"\n{verdict(found)}")
        back = [r for r in simulated(3.0, seed, retries=1) if r.sent_s > r.arrival_s]
        served, told = sum(r.status == "ok" for r in back), [r.sent_s - r.arrival_s for r in back]
        print(f"{len(back)} clients came back after {min(told):.0f} to {max(told):.0f} s: ", end="")
        print(f"{served / len(back):.0%} served\n")


# -- live --


class Live:
    """Sends completions to a server and keeps a `Row` for each."""

    def __init__(self, port: int, seed: int) -> None:
        self._url = f"http://127.0.0.1:{port}/v1/completions"
        self._rng = Random(seed)
        self._start_s = time.perf_counter()

    def body(self) -> bytes:
        prompt = [self._rng.randrange(300, 4000) for _ in range(self._rng.randrange(20, 120))]
        length = self._rng.randrange(20, 120)
        return json.dumps(
            {"prompt": prompt, "max_tokens": length, "ignore_eos": True, "stream": True}
        ).encode()

    async def one(self, session: aiohttp.ClientSession, body: bytes) -> Row:
        sent_s = time.perf_counter() - self._start_s
        headers = {"content-type": "application/json"}
        async with session.post(self._url, data=body, headers=headers) as answer:
            if answer.status != 200:
                after_s = float(answer.headers.get("retry-after", "0"))
                return Row(sent_s, 0.0, time.perf_counter() - self._start_s, answer.status, after_s)
            first_s = 0.0
            async for _ in answer.content:
                first_s = first_s or time.perf_counter() - self._start_s
            return Row(sent_s, first_s, time.perf_counter() - self._start_s, 200)

    async def closed(self, users: int, seconds: float) -> float:
        """Return completions per second of a closed loop."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            done, stop_s = 0, time.perf_counter() + seconds
            start_s = stop_s - 0.7 * seconds  # later, the first requests have ended

            async def user() -> None:
                nonlocal done
                while time.perf_counter() < stop_s:
                    row = await self.one(session, self.body())
                    done += row.status == 200 and start_s <= row.end_s + self._start_s < stop_s
                    if row.status != 200:
                        await asyncio.sleep(0.02)

            await asyncio.gather(*(user() for _ in range(users)))
            return done / (0.7 * seconds)

    async def open(self, rate: float, seconds: float, *, retry: bool = False) -> tuple[list[Row], list[Row]]:
        """Send at a Poisson rate; return the rows, and of those that came back once after the time told theirs."""
        self._start_s = time.perf_counter()
        again: list[Row] = []
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def client(body: bytes) -> Row:
                row = await self.one(session, body)
                if retry and row.retry_after_s:
                    await asyncio.sleep(row.retry_after_s)
                    again.append(await self.one(session, body))
                return row

            tasks = []
            while time.perf_counter() - self._start_s < seconds:
                await asyncio.sleep(self._rng.expovariate(rate))
                tasks.append(asyncio.create_task(client(self.body())))
            return list(await asyncio.gather(*tasks)), again


class Busy:
    """The share of all cores' time that other processes, and other guests of the host, took since it was made."""

    def __init__(self) -> None:
        self._total, self._steal, self._used = self._read()
        self._own = own_jiffies()

    def _read(self) -> tuple[int, int, int]:
        fields = [int(each) for each in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[7], sum(fields) - fields[3] - fields[4]

    def __str__(self) -> str:
        total, steal, used = self._read()
        span = max(1, total - self._total)
        stolen, others = (steal - self._steal) / span, (used - self._used - own_jiffies() + self._own) / span
        return f"of the cores' time {stolen:.1%} stolen by the host, {max(0.0, others - stolen):.0%} used by others"


def own_jiffies() -> int:
    """Return the CPU time of this process and its descendants."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            stats[int(path.parent.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    own = {os.getpid()}
    for pid in sorted(stats):  # a child has the greater pid, but for a wrap
        if stats[pid][0] in own:
            own.add(pid)
    return sum(stats[pid][1] for pid in own)


@contextlib.contextmanager
def timed_server(*flags: str) -> Iterator[tuple[int, int]]:
    """As `slo_live.server`, with steps that sleep."""
    port, names = free_port(), [flag.removeprefix("--").replace("-", "_") for flag in flags]
    settings = [f"{name}={value}" for name, value in zip(names[::2], flags[1::2], strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        cost = Path(folder, "cost.json")
        cost.write_text(json.dumps(TIMED_STEP.to_json()))
        command = [sys.executable, "-m", "tests.sim.serve_timed", str(cost), f"port={port}", *settings]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            assert process.stderr is not None
            while b"ready " not in (line := process.stderr.readline()):
                assert line, "the server ended"
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield port, 0
        finally:
            process.terminate()
            process.wait(30)


def live(seconds: float, seed: int, rounds: int, *, timed: bool) -> None:
    """Rounds of all loads in turn; each is calibrated again, so that a machine that gets slower shifts all of them."""
    flags, server = ("--max-num-seqs", "16", "--max-num-batched-tokens", "256"), quill_server
    if timed:
        server = timed_server
    busy, began_s = Busy(), time.monotonic()
    with server(*flags) as (port, _):
        rate = asyncio.run(Live(port, seed).closed(24, seconds))
        rows, _ = asyncio.run(Live(port, seed).open(LOADS[0] * rate, 2 * seconds))
    ttft_s = float(np.percentile([row.first_s - row.sent_s for row in rows if row.status == 200], 99))
    limit_ms = round(1e3 * min(2.0, max(0.1, 1.5 * ttft_s)))
    print(
        f"{'Steps that sleep' if timed else 'Quill'}, seed {seed}, {rounds} rounds of {seconds:g} s per load, "
        f"--max-ttft-ms {limit_ms} (1.5 × p99 at 0.9 ×)"
    )
    pooled: dict[float, list[Row]] = {load: [] for load in LOADS}
    ratios, goods = [], []
    with server(*flags, "--max-ttft-ms", str(limit_ms)) as (port, _):
        for number in range(rounds):
            rate = asyncio.run(Live(port, seed + number).closed(24, seconds / 2))
            print(f"\nRound {number + 1}: {rate:.2f} requests/s sustainable\n\n{HEAD}")
            found = {}
            for load in LOADS:
                rows, _ = asyncio.run(Live(port, seed + number).open(load * rate, seconds))
                found[load] = show(load, rows, seconds)
                late = [replace(row, end_s=math.inf) if row.end_s > seconds else row for row in rows]
                pooled[load] += late
            ratios.append(found[LOADS[-1]][0] / found[LOADS[0]][0])
            goods.append(found[LOADS[-1]][1] / max(good for _, good in found.values()))
        changed = asyncio.run(Live(port, seed + rounds).open(LOADS[-1] * rate, seconds, retry=True))
    with server(*flags, "--max-ttft-ms", str(limit_ms)) as (port, _):
        asyncio.run(Live(port, seed).open(LOADS[0] * rate, seconds, retry=True))
        always = asyncio.run(Live(port, seed + rounds).open(LOADS[-1] * rate, seconds, retry=True))
    print(f"\nAll rounds together\n\n{HEAD}")
    together = {load: show(load, rows, seconds * rounds) for load, rows in pooled.items()}
    print(f"\n{verdict(together)}")
    print(
        f"Medians of the rounds: p99 TTFT {np.median(ratios):.2f} ×, goodput {np.median(goods):.0%} of its peak"
    )
    told("Clients that always come back", *always)
    told("The same where none had come back before", *changed)
    print(f"{time.monotonic() - began_s:.0f} s in all; {busy}")


def told(title: str, rows: Sequence[Row], again: Sequence[Row]) -> None:
    """Print how many of the clients that came back after the time told were served."""
    times_s = [row.retry_after_s for row in rows if row.retry_after_s] or [0.0]
    served = sum(row.status == 200 for row in again)
    ttft_s = [row.first_s - row.sent_s for row in (*rows, *again) if row.status == 200]
    print(
        f"{title}: {len(again)} after {min(times_s):.0f} to {max(times_s):.0f} s, {served / max(1, len(again)):.0%} "
        f"served; p99 TTFT {np.percentile(ttft_s, 99):.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--live", action="store_true")
    parser.add_argument("--timed", action="store_true", help="with --live: steps sleep, there is no model")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each load in each round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if args.live:
        live(args.seconds, seeds[0], args.rounds, timed=args.timed)
    else:
        simulate_all(seeds)


if __name__ == "__main__":
    main()

"""A server under mixed load for a long time, and how what it holds grows: ``python -m benchmarks.soak [--minutes 20]``.

Starts ``quire serve quill``. Each cycle sends streams of every kind with new seeds and prompts, requests of a fuzzer,
clients that vanish, embeddings, stored and background responses, uploads and batches that are deleted, and adapters
that are loaded and unloaded; then it waits until the server is idle and reads resident and shared memory, handles and
threads of the API process and the engine, and the KV blocks held. Printed are least-squares slopes per minute, after
the first quarter as warm-up. Exit status 1 where blocks are held, or handles, threads or resident memory keep growing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import httpx
import numpy as np
from tests.faults import attacks
from tests.faults.junk import request_of
from tests.faults.processes import engine_of
from tests.faults.report import table, write_section
from tests.faults.streams import Streams, mixed
from tests.faults.world import TINY, World

WARM_UP = 0.25  # of the run
LINE = {"method": "POST", "url": "/v1/completions", "body": {**TINY, "model": "quill"}}
MAX_GROWTH = 0.01  # of the resident memory, per hour, beyond twice the slope's standard error


def read(pid: int) -> dict[str, float]:
    """Return resident and shared memory in MiB, handles and threads of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "resident, MiB": int(status["VmRSS"].split()[0]) / 1024,
        "shared memory, MiB": int(status["RssShmem"].split()[0]) / 1024,
        "handles": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(status["Threads"]),
    }


class Soak:
    """The load, cycle after cycle, and the samples between."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._rng = world, Random(seed)
        self._begin_s = time.monotonic()
        self.samples: list[tuple[float, dict[str, float]]] = []
        self.done: Counter[str] = Counter()

    async def cycle(self, number: int) -> None:
        world = self._world
        asks = mixed(24, first_seed=self._rng.randrange(2**40))
        for ask in asks:
            name = "prompt" if "prompt" in ask.body else None
            if name:
                ask.body[name] = f"{self._rng.random()} {ask.body[name]}"
        async with (
            Streams(world.url, asks) as streams,
            httpx.AsyncClient(base_url=world.url, timeout=120) as client,
        ):
            await asyncio.gather(self._fuzz(client), self._jobs(client), self._texts(client, number))
            await attacks.vanish(world)
            if number % 3 == 0:
                await attacks.nan_weights(world)
            for outcome in await streams.outcomes():
                self.done["streams"] += 1
                self.done["streams without an end"] += outcome.num_missing or outcome.content is None
        sample = {"KV blocks held": float(await world.num_blocks_held())}
        for name, pid in (("API", world.server.process.pid), ("engine", engine_of(world.server))):
            sample |= {f"{name}: {what}": value for what, value in read(pid).items()}
        self.samples.append(((time.monotonic() - self._begin_s) / 60, sample))

    async def _fuzz(self, client: httpx.AsyncClient) -> None:
        for _ in range(40):
            asked = request_of(self._rng)
            with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, UnicodeError):
                headers = {"content-type": asked.media_type} if asked.media_type.isprintable() else {}
                answer = await client.request(asked.method, asked.path, content=asked.body, headers=headers)
                status = answer.status_code
                self.done[f"fuzzed {status if status >= 500 else f'{status // 100}xx'}"] += 1

    async def _jobs(self, client: httpx.AsyncClient) -> None:
        lines = "\n".join(json.dumps({**LINE, "custom_id": f"c{i}"}) for i in range(8)).encode()
        files = {"file": ("a.jsonl", lines), "purpose": (None, "batch")}
        uploaded = (await client.post("/v1/files", files=files)).json()
        body = {"input_file_id": uploaded["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=body)).json()
        while batch["status"] not in ("completed", "failed", "expired"):
            await asyncio.sleep(0.2)
            batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
        for name in ("input_file_id", "output_file_id"):
            await client.delete(f"/v1/files/{batch[name]}")
        self.done[f"batches {batch['status']}"] += 1

    async def _texts(self, client: httpx.AsyncClient, number: int) -> None:
        await client.post("/v1/embeddings", json={"input": [f"text {number} {i}" for i in range(32)]})
        body = {"input": f"Hello {number}", "max_output_tokens": 8}
        first = (await client.post("/v1/responses", json={**body, "background": True})).json()
        await client.post("/v1/responses", json=body)
        await asyncio.sleep(0.5)
        await client.delete(f"/v1/responses/{first['id']}")
        self.done["responses"] += 2


def slopes(samples: list[tuple[float, dict[str, float]]]) -> list[tuple[str, float, float, float, float]]:
    """Return (what, at the beginning, at the end, slope per minute, its standard error), after the warm-up."""
    kept = samples[int(WARM_UP * len(samples)) :]
    minutes = np.array([at for at, _ in kept])
    rows = []
    for name in kept[0][1]:
        values = np.array([sample[name] for _, sample in kept])
        (slope, _), covariance = (
            np.polyfit(minutes, values, 1, cov=True) if len(kept) > 3 else ((0.0, 0.0), np.zeros((2, 2)))
        )
        third = max(1, len(values) // 4)
        begin, end = float(np.median(values[:third])), float(np.median(values[-third:]))
        rows.append((name, begin, end, float(slope), float(np.sqrt(max(0.0, covariance[0, 0])))))
    return rows


def growing(rows: list[tuple[str, float, float, float, float]]) -> list[str]:
    """Return what keeps growing, beyond what the scatter of its samples explains."""
    wrong = []
    for name, begin, end, slope, error in rows:
        sure = slope - 2 * error
        if name == "KV blocks held":
            wrong += [name] if begin or end else []
        elif "resident" in name:
            wrong += [name] if sure * 60 > MAX_GROWTH * begin and end - begin > 4 else []
        elif sure > 0.05 and end > begin + 2:
            wrong.append(name)
    return wrong


async def soak(minutes: float, seed: int) -> Soak:
    with World(
        seed, flags=("--num-kv-blocks", "2048")
    ) as world:  # small: its pages are all touched in the warm-up
        load = Soak(world, seed)
        number, until_s = 0, time.monotonic() + 60 * minutes
        while time.monotonic() < until_s:
            await load.cycle(number)
            number += 1
            at, sample = load.samples[-1]
            if number % 5 == 1:
                print(f"{at:.1f} min: " + ", ".join(f"{k} {v:.0f}" for k, v in sample.items()), flush=True)
    return load


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--report", action="store_true", help="write the slopes to benchmarks/results/faults.md"
    )
    args = parser.parse_args()
    load = asyncio.run(soak(args.minutes, args.seed))
    rows = slopes(load.samples)
    cells = [(n, f"{b:.1f}", f"{e:.1f}", f"{s:+.4f} ± {error:.4f}") for n, b, e, s, error in rows]
    wrong = growing(rows)
    text = (
        f"{args.minutes:g} minutes, seed {args.seed}, {len(load.samples)} cycles, the first quarter is warm-up. "
        f"Done: {dict(sorted(load.done.items()))}.\n\n"
        f"{table(('what', 'first quarter after it', 'last quarter', 'slope per minute'), cells)}\n\n"
        f"Keeps growing: {', '.join(wrong) or 'nothing'}."
    )
    print(text)
    if args.report:
        write_section("Soak", f"make soak ARGS='--minutes {args.minutes:g}'", text)
    return 1 if wrong or load.done["streams without an end"] else 0


if __name__ == "__main__":
    sys.exit(main())

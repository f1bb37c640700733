"""What a watching page costs: tokens/s of a server under streams, with a reader of the live feed and without, in turn.

    PYTHONPATH=. python benchmarks/cockpit_overhead.py [--rounds 5] [--streams 256] [--seconds 6] [--page]

Rounds alternate; the ratio is that of the sums. A message itself says what it took the engine. With
``--page`` Chromium shows the live page in place of a plain reader; it then takes CPU time of the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from tests.cockpit.browser import Browser
from tests.e2e.live import LiveServer


async def stream(session: aiohttp.ClientSession, url: str, until_s: float, index: int) -> None:
    """Ask for one long answer after the other."""
    while time.monotonic() < until_s:
        body = {
            "prompt": f"Tale {index}: once upon a time",
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                async for _ in answer.content.iter_any():
                    if time.monotonic() >= until_s:
                        return
        except aiohttp.ClientError:
            return


async def watch(
    session: aiohttp.ClientSession, url: str, until_s: float, costs: list[float], sizes: list[int]
) -> None:
    """Read the feed as a page does."""
    async with session.get(f"{url}/engine/live") as answer:
        rest = b""
        async for piece in answer.content.iter_any():
            *frames, rest = (rest + piece).split(b"\n\n")
            for frame in frames:
                if frame.startswith(b"data: "):
                    costs.append(json.loads(frame[6:])["cost_s"])
                    sizes.append(len(frame))
            if time.monotonic() >= until_s:
                return


def generated(url: str) -> float:
    """Return the tokens that the server has generated since its start."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return sum(
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("vllm:generation_tokens_total{")
    )


async def round_of(
    url: str, streams: int, seconds: float, *, watched: bool, costs: list[float], sizes: list[int]
) -> float:
    """Return tokens per second of the middle of a round."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, read_bufsize=4 << 20) as session:
        until_s = time.monotonic() + seconds + 2.0
        tasks = [asyncio.create_task(stream(session, url, until_s, i)) for i in range(streams)]
        if watched:
            tasks.append(asyncio.create_task(watch(session, url, until_s, costs, sizes)))
        await asyncio.sleep(1.5)
        begin, before = time.monotonic(), await asyncio.to_thread(generated, url)
        await asyncio.sleep(seconds)
        made, took_s = await asyncio.to_thread(generated, url) - before, time.monotonic() - begin
        await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(1.0)
    return made / took_s


def cpu_s(server_pid: int) -> float:
    """Return the CPU seconds of the page's process so far."""
    children = Path(f"/proc/{server_pid}/task/{server_pid}/children").read_text().split()
    pid = next(pid for pid in children if b"cockpit" in Path(f"/proc/{pid}/cmdline").read_bytes())
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(given: Any) -> None:
    command = [
        "-m",
        "quire.cli",
        "serve",
        "quill",
        "--port",
        "0",
        "--cockpit",
        "--max-num-seqs",
        str(given.streams),
    ]
    with tempfile.TemporaryDirectory() as folder, LiveServer(command, Path(folder) / "log") as server:
        costs: list[float] = []
        sizes: list[int] = []
        rates: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * given.rounds):
            watched = number % 2 == 1
            browser = Browser(server.url) if watched and given.page else None
            if browser is not None:
                browser.open("/cockpit/live", ".ql")
            begin_s, before_s = time.monotonic(), cpu_s(server.process.pid)
            rate = asyncio.run(
                round_of(
                    server.url,
                    given.streams,
                    given.seconds,
                    watched=watched and browser is None,
                    costs=costs,
                    sizes=sizes,
                )
            )
            if browser is not None:
                share = (cpu_s(server.process.pid) - before_s) / (time.monotonic() - begin_s)
                print(f"the page's process took {share:.2%} of a core")
                browser.close()
            rates[watched].append(rate)
            print(f"{'open  ' if watched else 'closed'} {rate:8.0f} tokens/s", flush=True)
        ratio = sum(rates[True]) / sum(rates[False])
        print(f"open / closed: {ratio:.3f}")
        if costs:
            share = sum(costs) / len(costs) * 4
            kib = sum(sizes) / len(sizes) / 1024
            print(
                f"engine: {250 * share:.2f} ms a message of {kib:.0f} KiB; at four a second {share:.2%} of a core"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--page", action="store_true")
    main(parser.parse_args())

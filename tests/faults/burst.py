"""A burst of requests from a process of its own: ``python -m tests.faults.burst URL NUM``; prints one JSON object."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections import Counter
from urllib.parse import urlsplit

BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": 64, "ignore_eos": True}).encode()
HEAD = (
    "POST /v1/completions HTTP/1.1\r\nhost: burst\r\nconnection: close\r\n"
    f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
)


async def one(host: str, port: int, statuses: Counter[str], latencies_s: list[float]) -> None:
    start_s = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(HEAD.encode() + BODY)
        answer = await reader.read(1 << 20)
        status = answer.split(b" ", 2)[1].decode() if answer else "closed"
        while await reader.read(1 << 16):
            pass
        writer.close()
    except OSError as error:
        status = type(error).__name__
    statuses[status] += 1
    if status != "200":
        latencies_s.append(time.perf_counter() - start_s)


async def burst(url: str, num: int) -> dict[str, object]:
    parts = urlsplit(url)
    statuses: Counter[str] = Counter()
    refused_s: list[float] = []
    start_s = time.perf_counter()
    await asyncio.gather(
        *(one(parts.hostname or "", parts.port or 0, statuses, refused_s) for _ in range(num))
    )
    return {
        "statuses": dict(statuses),
        "last_refusal_s": round(max(refused_s, default=0.0), 3),
        "total_s": round(time.perf_counter() - start_s, 3),
    }


if __name__ == "__main__":
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    print(json.dumps(asyncio.run(burst(sys.argv[1], int(sys.argv[2])))))

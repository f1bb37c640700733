"""Routing policies live: 4 replicas of Quill behind a gateway, many conversations that share their system prompts.

    python -m benchmarks.gateway_routing        # --policies round-robin,prefix-hybrid picks some

Each policy gets the same conversations, under a cache salt of its own, so that it finds nothing of the one before. A
conversation waits between its turns, so replicas serve others meanwhile and evict. The caches are small: each replica
holds about a quarter of what all conversations need.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from tests.e2e.live import LiveServer
from tests.gateway.live import Live, gateway_of
from tests.gateway.services import free_port

KEY = "between-us"
POLICIES = "round-robin,least-tokens,prefix-hash,session,prefix-predicted,prefix-reported,prefix-hybrid"
SESSIONS, TURNS, PREFIXES, THINK_S, MAX_TOKENS = 24, 6, 6, 0.6, 12
WORDS = "the little fox went home and saw a big red ball near its friend who was happy to play all day"


def text(random: Random, num_words: int) -> str:
    words = WORDS.split()
    return " ".join(random.choice(words) for _ in range(num_words))


async def turn(live: Live, body: dict[str, Any], session: str) -> tuple[float, str, dict[str, Any]]:
    """Return (seconds to the first content, the answer, its usage)."""
    begin_s, first_s, said, usage = time.perf_counter(), 0.0, "", {}
    headers = {"x-session-id": session}
    async with live.session.post(live.url + "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.read()
        async for line in response.content:
            if line.startswith(b"data: {"):
                value = json.loads(line[6:])
                usage = value.get("usage") or usage
                content = value["choices"][0]["delta"].get("content") if value["choices"] else None
                if content and not first_s:
                    first_s = time.perf_counter() - begin_s
                said += content or ""
    return first_s or time.perf_counter() - begin_s, said, usage


async def converse(live: Live, policy: str, number: int, found: list[tuple[float, int, int]]) -> None:
    random = Random(number)
    system = text(Random(f"prefix {number % PREFIXES}"), 300)
    messages = [{"role": "system", "content": system}]
    for _ in range(TURNS):
        await asyncio.sleep(random.expovariate(1 / THINK_S))
        messages.append({"role": "user", "content": text(random, 60)})
        body = {
            "model": "quill", "messages": messages, "max_tokens": MAX_TOKENS, "stream": True, "seed": number,
            "stream_options": {"include_usage": True}, "cache_salt": policy, "ignore_eos": True,
        }  # fmt: skip
        seconds, said, usage = await turn(live, body, f"s{number}")
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        found.append((seconds, usage["prompt_tokens"], cached))
        messages.append({"role": "assistant", "content": said})


async def measure(policy: str, urls: list[str]) -> str:
    config = {
        "backends": [{"name": f"r{i}", "url": url} for i, url in enumerate(urls)],
        "routing": {"policy": policy},
        "timeouts": {"first_token_s": 120.0},
        "health": {"slow_factor": 1000.0, "timeout_s": 30.0},
        "gateway_key": KEY,
    }
    found: list[tuple[float, int, int]] = []
    async with gateway_of(config) as live:
        begin_s = time.perf_counter()
        await asyncio.gather(*(converse(live, policy, number, found) for number in range(SESSIONS)))
        seconds = time.perf_counter() - begin_s
    ttft = sorted(1e3 * each[0] for each in found)
    hits = sum(each[2] for each in found) / sum(each[1] for each in found)
    p50, p99 = ttft[len(ttft) // 2], ttft[int(len(ttft) * 0.99)]
    return f"| {policy} | {100 * hits:.0f} % | {p50:,.0f} | {p99:,.0f} | {len(found) / seconds:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--kv-blocks", type=int, default=480)
    args = parser.parse_args()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        urls = []
        for number in range(args.replicas):
            flags = ["--port", str(free_port()), "--threads", "1", "--gateway-key", KEY]
            flags += ["--num-kv-blocks", str(args.kv_blocks)]
            command = ["-m", "quire.cli", "serve", "quill", *flags]
            urls.append(stack.enter_context(LiveServer(command, Path(folder) / f"log{number}")).url)
        print(
            "| policy | prompt tokens from the cache | TTFT p50, ms | p99, ms | requests/s |\n|---|---|---|---|---|"
        )
        for policy in args.policies.split(","):
            print(asyncio.run(measure(policy, urls)), flush=True)


if __name__ == "__main__":
    main()

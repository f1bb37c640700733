"""First tokens of prompts that are computed, in memory, or with a peer: ``python benchmarks/kv_peers.py MODEL``.

Starts two servers, of which the second takes blocks from the first. Each round and length has a prompt of its own, and
measures, at the second server: another prompt of the same length, which is nowhere (cold); the prompt, which the first
has just computed (peer); and the prompt again (memory). The machine's other work disturbs all alike, so only the ratios
within a round say something. Answers are compared with those of the first server.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import secrets
import statistics
import tempfile
from pathlib import Path
from typing import Any

import httpx
from tests.e2e.live import LiveServer
from tests.gateway.services import free_port

WORDS = ("rain", "stone", "river", "lamp", "garden", "winter", "letter", "bridge", "music", "paper")


def prompt_of(name: str, num_tokens: int) -> str:
    """Return a text of about so many tokens that has nothing in common with those of other names."""
    digest = hashlib.shake_128(name.encode()).digest(num_tokens)
    return f"{name}. " + " ".join(WORDS[byte % len(WORDS)] for byte in digest)


def ask(server: LiveServer, prompt: str, **more: Any) -> dict[str, Any]:
    """Return the answer to a prompt."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "timing": True, **more}
    answer: dict[str, Any] = (
        httpx.post(server.url + "/v1/completions", json=body, timeout=600.0).raise_for_status().json()
    )
    return answer


def measure(giver: LiveServer, taker: LiveServer, name: str, num_tokens: int) -> dict[str, float]:
    """Return the first token's milliseconds by where the prompt is. Raises `AssertionError` where tokens differ."""
    cold = ask(taker, prompt_of(f"cold {name}", num_tokens))
    prompt = prompt_of(name, num_tokens)
    params = ask(giver, prompt, kv_transfer_params={"do_remote_decode": True})["kv_transfer_params"]
    peer = ask(taker, prompt, kv_transfer_params=params)
    memory = ask(taker, prompt)
    texts = {answer["choices"][0]["text"] for answer in (peer, memory, ask(giver, prompt))}
    assert len(texts) == 1, texts
    timing = peer["timing"]
    assert timing["prefill_remote_tokens"] >= timing["prompt_tokens"] - 16, timing
    found = {"cold": cold, "peer": peer, "memory": memory}
    return {where: answer["timing"]["first_token_ms"] for where, answer in found.items()}


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--lengths", default="512,2048")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ["QUIRE_KV_SECRET"] = secrets.token_hex(16)
    ports = [free_port(), free_port()]
    command = ["-m", "quire.cli", "serve", args.model, "--port", "0", "--threads", "1", "--kv-memory", "1GiB"]
    shares = [["--kv-share", f"127.0.0.1:{port}:1GiB"] for port in ports]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / name for name in ("giver", "taker")]
        with (
            LiveServer([*command, *shares[0]], logs[0], start_s=600) as giver,
            LiveServer(
                [*command, *shares[1], "--kv-peers", f"127.0.0.1:{ports[0]}"], logs[1], start_s=600
            ) as taker,
        ):
            measure(giver, taker, "warm-up", 256)
            print(
                "| tokens | where | ms, median (least … most) | cold ÷ it, median of rounds |\n|---|---|---|---|"
            )
            for length in map(int, args.lengths.split(",")):
                rounds = [
                    measure(giver, taker, f"{length} {number}", length) for number in range(args.rounds)
                ]
                for where in ("cold", "peer", "memory"):
                    times = sorted(each[where] for each in rounds)
                    ratio = statistics.median(each["cold"] / each[where] for each in rounds)
                    spread = f"{statistics.median(times):,.0f} ({times[0]:,.0f} … {times[-1]:,.0f})"
                    print(f"| {length:,} | {where} | {spread} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()

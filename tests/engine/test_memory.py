"""What an engine keeps does not grow with the requests that it has served: by counts, and by its resident memory."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.live import LiveServer
from tests.engine.test_recording import GRAMMAR, quill, request
from tests.faults.processes import engine_of

from quire.clock import WallClock
from quire.engine.in_process import InProcessClient
from quire.engine.messages import AbortRequest
from quire.sampling.grammars import _MAX_COMPILED

MIB = 2**20


def test_nothing_is_kept_of_requests_that_ended(tmp_path: Path) -> None:
    client = InProcessClient(quill(tmp_path, speculate="ngram"), WallClock())
    client.wait_ready()
    rng, left = random.Random(3), set()
    for i in range(24):
        fields: dict[str, Any] = {"max_tokens": rng.randrange(1, 12), "temperature": 0.8}
        fields |= rng.choice([{}, {"n": 2}, {"presence_penalty": 0.5}, {"grammar": GRAMMAR}, {"logprobs": 2}])
        client.send(request(f"r{i}", i, **fields))
        left |= {(f"r{i}", index) for index in range(fields.get("n", 1))}
        if i % 5 == 4:
            client.send(AbortRequest(f"r{i}"))
    while left:
        left -= {(e.request_id, e.sample_index) for e in client.receive(5.0) if e.finish_reason is not None}
    client.send(request("last", 99, max_tokens=1))  # its plan tells the worker what has gone
    while not any(event.finish_reason for event in client.receive(5.0)):
        pass
    core = client.core
    state, worker = core.scheduler.state, core.executor._inner.worker  # type: ignore[attr-defined]
    assert not core.scheduler.has_work
    assert (len(state.requests), len(state.sequences), len(state.waiting)) == (0, 0, 0)
    assert (state.waiting.num_tokens, state.waiting.num_bytes) == (0, 0)
    assert len(worker.seqs) <= 1  # the last
    assert len(worker.runner.grammars._compiled) <= _MAX_COMPILED
    stats = core.stats()
    assert stats.num_free_blocks + stats.num_idle_blocks == stats.num_blocks
    recorder = core.recorder
    assert recorder is not None
    assert len(recorder) <= 100
    assert len(recorder._live) <= 8
    client.close()


def body(rng: random.Random) -> dict[str, Any]:
    """A request of a mixed load."""
    prompt = [rng.randrange(300, 4000) for _ in range(rng.randrange(4, 160))]
    made: dict[str, Any] = {"model": "quill", "prompt": prompt, "max_tokens": rng.randrange(1, 40)}
    made["seed"] = rng.randrange(2**31)
    pattern = f"[a-z]{{1,{rng.randrange(2, 30)}}}{rng.randrange(1000)}"
    kinds: list[dict[str, Any]] = [
        {}, {"n": 3}, {"presence_penalty": 0.5, "repetition_penalty": 1.2}, {"logprobs": 4}, {"stream": True},
        {"guided_regex": pattern}, {"logit_bias": {str(rng.randrange(4000)): 5.0}}, {"temperature": 0.0},
    ]  # fmt: skip
    return made | rng.choice(kinds)


@pytest.mark.slow
def test_resident_memory_is_flat_under_a_mixed_load(tmp_path: Path) -> None:
    """After warm-up (the pool touched, the ring full) eight clients' requests leave nothing behind."""
    command = ["-m", "quire.cli", "serve", "quill", "--port", "0", "--threads", "1", "--num-kv-blocks", "256"]
    command += ["--max-model-len", "512", "--record-dir", str(tmp_path), "--speculate", "ngram"]
    with (
        LiveServer(command, tmp_path / "log") as live,
        httpx.Client(base_url=live.url, timeout=120) as client,
    ):
        pid = engine_of(live)

        def resident() -> float:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE") / MIB

        def serve(count: int, seed: int) -> None:
            rng = random.Random(seed)
            bodies = [body(rng) for _ in range(count)]
            with ThreadPoolExecutor(8) as pool:
                for answer in pool.map(lambda made: client.post("/v1/completions", json=made), bodies):
                    assert answer.status_code == 200, answer.text

        serve(600, 1)
        sizes = [resident()]
        for turn in range(4):
            serve(300, 2 + turn)
            sizes.append(resident())
        print("MiB:", " ".join(f"{size:.1f}" for size in sizes))
        # Grammars and the allocator move by some MiB; a leak of 10 KiB per request would be 12 MiB.
        assert sizes[-1] - sizes[0] < 12

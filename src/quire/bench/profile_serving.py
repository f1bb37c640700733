"""What a server adds to its engine's step times: a live one under closed loops, against the executor's cost model.

At ``c`` users with equal requests all decode together, so the gap between two tokens is one step of ``c`` rows. What it
takes beyond the model is the host's: plan, apply, events, and the cores that API process and load generator take from
the compute threads. The first token of a single user tells what a request costs on its way.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.bench.client import StreamingClient, Target, api_url
from quire.bench.load import Load, Runner
from quire.bench.summary import OK, RequestRecord
from quire.errors import ConfigError
from quire.plan.cost_model import CostModel, StepFeatures, chunk_pairs
from quire.plan.fit import nnls
from quire.plan.profile import HostCost
from quire.workload.prompts import PromptMaker
from quire.workload.request import WorkloadRequest

PROMPT, OUTPUT = 32, 96  # tokens of a request of the closed loops
USERS = (1, 2, 4, 8, 16, 32)
PROMPTS = (32, 256, 1024)  # tokens of the requests that are sent one by one
ONE_BY_ONE = 6  # of each length


@dataclass(frozen=True, slots=True)
class Gap:
    """The median gap between tokens with so many users."""

    num_users: int
    seconds: float


def measure_host(
    url: str, model: str, executor: CostModel, *, max_num_seqs: int, max_model_len: int, vocab_size: int
) -> HostCost:
    """Return what the server at ``url`` adds to ``executor``.

    Raises:
        ConfigError: requests fail.
    """
    target = Target(api_url(url), model)
    prompts = PromptMaker(vocab_size, seed=77, first_id=min(256, vocab_size // 2))
    users = [c for c in USERS if c <= max_num_seqs]
    lengths = [p for p in PROMPTS if 2 * p <= max_model_len]
    gaps, first = asyncio.run(_measure(target, prompts, users, lengths))
    beyond = [(gap.num_users, gap.seconds - _decode_s(executor, gap.num_users), gap.seconds) for gap in gaps]
    fixed_s, per_seq_s = _line(beyond)
    step = executor.plus(fixed_s=fixed_s, per_seq_s=per_seq_s)
    way = [(p, s - step.seconds(StepFeatures(p, 1, 1, 0, p, chunk_pairs(0, p))), s) for p, s in first]
    request_s, per_prompt_token_s = _line(way)
    return HostCost(fixed_s, per_seq_s, request_s, per_prompt_token_s)


async def _measure(
    target: Target, prompts: PromptMaker, users: Sequence[int], lengths: Sequence[int]
) -> tuple[list[Gap], list[tuple[int, float]]]:
    """Return the gaps by users, and (prompt tokens, seconds to the first token) of a single one."""
    client = StreamingClient(target)
    index = 0

    async def loop(num_users: int, count: int, num_prompt: int, num_output: int) -> list[RequestRecord]:
        nonlocal index
        made = [WorkloadRequest(0.0, num_prompt, num_output, index=index + i) for i in range(count)]
        index += count
        records = await Runner(client, prompts, Load(num_users, closed=True)).run(made)
        bad = next((r for r in records if r.status != OK), None)
        if bad is not None:
            raise ConfigError(
                f"the server under measurement failed a request: {bad.error} {bad.detail or ''}"
            )
        return records

    try:
        await loop(1, 2, PROMPT, OUTPUT)  # warm
        gaps = []
        for num in users:
            records = await loop(num, max(3, 2 * num), PROMPT, OUTPUT)
            gaps.append(Gap(num, statistics.median(gap for r in records for gap in r.itl_s)))
        first = []
        for length in lengths:
            records = await loop(1, ONE_BY_ONE, length, 2)
            first.append((length, statistics.median(r.ttft_s for r in records if r.ttft_s is not None)))
    finally:
        await client.close()
    return gaps, first


def _decode_s(executor: CostModel, num: int) -> float:
    return executor.seconds(StepFeatures(num, num, num, num * (PROMPT + OUTPUT // 2), 0, 0))


def _line(points: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """Fit ``y = a + b·x`` with a, b ≥ 0 to (x, y, whole), with errors relative to the whole."""
    a = np.array([[1.0 / whole, x / whole] for x, _, whole in points])
    b = np.array([max(0.0, y) / whole for _, y, whole in points])
    scale = np.linalg.norm(a, axis=0)
    fixed, slope = (nnls(a / scale, b) / scale).tolist()
    return fixed, slope

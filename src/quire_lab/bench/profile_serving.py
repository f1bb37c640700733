"""The time that a server adds to its engine's steps: a live server under closed loops, against the fitted cost model.

At ``c`` users with equal requests all sequences decode together, so the gap between two tokens is one step of ``c``
rows. The part that the model does not explain is the host's: plan, apply, events, and the cores that the API process
and the load generator take from the compute threads. A prompt that a single user repeats is in the prefix cache: its
TTFT shows the cost of a request outside of the engine, and the TTFT of its first sending the cost per prompt token
beyond the model.
"""

from __future__ import annotations

import asyncio
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from quire.args import defaults
from quire.cost.cost_model import CostModel, StepFeatures, chunk_pairs
from quire.cost.fit import cut_mean, scaled_nnls
from quire.cost.links import RankedSteps
from quire.cost.profile import HostCost
from quire.errors import ConfigError
from quire.http.drain import STOP_S
from quire_lab.bench.args import ServeBenchArgs
from quire_lab.bench.client import StreamingClient, Target, api_url
from quire_lab.bench.load import Load, Runner
from quire_lab.bench.summary import OK, RequestRecord
from quire_lab.workload.request import PromptMaker, WorkloadRequest

PROMPT, OUTPUT = 32, 96  # tokens of a request of the closed loops
USERS = (1, 2, 4, 8, 16, 32)
PROMPTS = (32, 256, 1024)  # tokens of the requests that are sent one by one
ONE_BY_ONE = 6  # requests of each length


@dataclass(frozen=True, slots=True)
class First:
    """The time to the first token of a single user's prompts."""

    num_prompt: int
    num_cached: int  # prompt tokens that were in the prefix cache
    seconds: float


def measure_host(
    url: str,
    model: str,
    executor: CostModel | RankedSteps,
    *,
    max_num_seqs: int,
    max_model_len: int,
    vocab_size: int,
) -> HostCost:
    """Return the time that the server at ``url`` adds to ``executor``.

    Raises:
        ConfigError: a request failed.
    """
    target = Target(api_url(url), model)
    prompts = PromptMaker(vocab_size, seed=77, first_id=min(256, vocab_size // 2))
    users = [c for c in USERS if c <= max_num_seqs]
    lengths = [p for p in PROMPTS if 2 * p <= max_model_len]
    gaps, first, again = asyncio.run(_measure(target, prompts, users, lengths))
    fixed_s, per_seq_s = _line([_beyond(executor, num, gap_s) for num, gap_s in gaps])
    step = executor.plus(fixed_s=fixed_s, per_seq_s=per_seq_s)

    def way(firsts: Sequence[First]) -> tuple[float, float]:
        return _line([(t.num_prompt, t.seconds - _first_s(step, t), t.seconds) for t in firsts])

    cached = [t for t in again if t.num_cached]
    if len(cached) < 2:
        # Prefix caching is off: the cost per prompt token counts as cost per row.
        request_s, per_row_s = way(first)
        return HostCost(fixed_s, max(0.0, per_seq_s - per_row_s), request_s, per_row_s=per_row_s)
    request_s, per_prompt_token_s = way(cached)
    rows = [
        (t.seconds - _first_s(step, t) - request_s) / t.num_prompt - per_prompt_token_s
        for t in first
        if t.num_prompt > PROMPT  # its rows dominate the TTFT
    ]
    per_row_s = max(0.0, statistics.fmean(rows or [0.0]))
    return HostCost(fixed_s, max(0.0, per_seq_s - per_row_s), request_s, per_prompt_token_s, per_row_s)


async def _measure(
    target: Target, prompts: PromptMaker, users: Sequence[int], lengths: Sequence[int]
) -> tuple[list[tuple[int, float]], list[First], list[First]]:
    """Return (users, mean gap between tokens in s), and a single user's first tokens: of new prompts, of the same."""
    client = StreamingClient(target)
    index = 0

    async def loop(
        num_users: int, count: int, num_prompt: int, num_output: int, *, again: bool = False
    ) -> list[RequestRecord]:
        nonlocal index
        index += 0 if again else count
        made = [WorkloadRequest(0.0, num_prompt, num_output, index=index + i) for i in range(count)]
        records = await Runner(client, prompts, Load(num_users, closed=True)).run(made)
        bad = next((r for r in records if r.status != OK), None)
        if bad is not None:
            raise ConfigError(
                f"the server under measurement failed a request: {bad.error} {bad.detail or ''}"
            )
        return records

    try:
        await loop(1, 2, PROMPT, OUTPUT)  # warm-up
        gaps = []
        for num in users:
            records = await loop(num, max(3, 2 * num), PROMPT, OUTPUT)
            gaps.append((num, cut_mean([gap for r in records for gap in r.itl_s])))
        first, again = [], []
        for length in lengths:
            first.append(_first(await loop(1, ONE_BY_ONE, length, 2)))
            again.append(_first(await loop(1, ONE_BY_ONE, length, 2, again=True)))
    finally:
        await client.close()
    return gaps, first, again


def _first(records: Sequence[RequestRecord]) -> First:
    seconds = cut_mean([r.ttft_s for r in records if r.ttft_s is not None])
    return First(records[0].num_prompt_tokens, min(r.num_cached_tokens for r in records), seconds)


def _first_s(executor: CostModel | RankedSteps, first: First) -> float:
    """Return the seconds of the first token's step, which computes the prompt tokens that are not cached."""
    start, rows = first.num_cached, first.num_prompt - first.num_cached
    return executor.seconds(StepFeatures(rows, 1, 1, 0, first.num_prompt, chunk_pairs(start, rows)))


def _beyond(executor: CostModel | RankedSteps, num: int, gap_s: float) -> tuple[int, float, float]:
    """Return, of one step where ``num`` users decode: its sequences, the seconds beyond the model, all of them.

    Between two tokens of a user each of a pipeline's steps in flight passes through the slowest stage.
    """
    stages = executor.num_stages if isinstance(executor, RankedSteps) else 1
    per_stage, out = -(-num // stages), min(num, stages)
    step = StepFeatures(per_stage, per_stage, per_stage, per_stage * (PROMPT + OUTPUT // 2), 0, 0)
    if isinstance(executor, RankedSteps) and out > 1:
        return per_stage, gap_s / out - max(executor.stage_seconds(step)), gap_s / out
    return per_stage, gap_s - executor.seconds(step), gap_s


def _line(points: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """Fit ``y = a + b·x`` with a, b ≥ 0 to (x, y, whole), with errors relative to the whole, which is above 0."""
    points = [point for point in points if point[2] > 0.0]
    if not points:
        return 0.0, 0.0
    a = np.array([[1.0 / total_s, x / total_s] for x, _, total_s in points])
    b = np.array([max(0.0, y) / total_s for _, y, total_s in points])
    fixed, slope = scaled_nnls(a, b).tolist()
    return fixed, slope


START_TIMEOUT_S: float = defaults(ServeBenchArgs)["timeout_s"]
_READY = re.compile(r"^ready\b.* on (http://\S+)$", re.MULTILINE)


class LiveServer:
    """A `quire serve` on a free port, for the time of a ``with`` block: started and ready on entry, ended on exit."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        command: Sequence[str] = ("-m", "quire.cli", "serve"),
        poll_s: float = 0.05,
    ) -> None:
        """``arguments``: model and flags of ``quire serve``; ``command`` replaces it by another server, in tests."""
        self._poll_s = poll_s
        self._command = [sys.executable, *command, *arguments]
        self._log = tempfile.TemporaryFile("w+b")  # noqa: SIM115 (closed on exit)
        self.url = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )
        try:
            self.url = self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def _wait(self) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            output = self._said()
            if match := _READY.search(output):
                return match[1]
            if self._process.poll() is not None:
                last = output.strip().splitlines()[-1:] or ["without a word"]
                raise ConfigError(f"the server ended while it started: {last[0]}")
            time.sleep(self._poll_s)
        raise ConfigError(f"the server was not ready after {START_TIMEOUT_S:.0f} s: {self._said()[-500:]}")

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

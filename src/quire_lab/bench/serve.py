"""`quire bench serve`: put load on any OpenAI-compatible server and report the results."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from quire.errors import ConfigError
from quire.slo import Slo
from quire_lab.bench.args import ServeBenchArgs
from quire_lab.bench.client import RequestFailed, StreamingClient, Target, api_url, settle
from quire_lab.bench.load import Conversation, Load, Runner
from quire_lab.bench.page import console, show
from quire_lab.bench.runs import Measured, Outcome, make_workload
from quire_lab.bench.summary import ERROR, RequestRecord, summarize
from quire_lab.workload.request import PromptMaker, Workload, WorkloadRequest


def run(flags: ServeBenchArgs) -> int:
    """Run the command; return the exit status: 1 where no request completed.

    Raises:
        ConfigError: a flag is wrong, or the server cannot be measured.
    """
    slo = Slo.parse(flags.slo) if flags.slo else None
    target, context = asyncio.run(_find(flags))
    if flags.max_model_len is None:
        flags = replace(flags, max_model_len=context)
    workload = make_workload(flags)
    bench = _Bench(flags, workload, slo, asyncio.run(_settled(flags, target)))
    title = f"quire bench serve: {bench.target.model}"
    return Measured(title, flags, bench.measure, bench.facts()).run(workload)


def make_load(flags: ServeBenchArgs, workload: Workload) -> Load:
    """Return how to send: ``--concurrency`` alone means a closed loop; with arrival times it limits an open one."""
    timed = any(r.arrival_s > 0.0 for r in workload.requests)
    return Load(flags.concurrency, closed=flags.concurrency is not None and not timed)


async def _find(flags: ServeBenchArgs) -> tuple[Target, int | None]:
    """Return the server with its model, and the context in tokens where the server reports it."""
    target = Target(
        api_url(flags.url),
        flags.model or "",
        flags.endpoint,
        flags.prompts == "ids",
        flags.api_key,
        flags.timeout_s,
        extra_body=_extra(flags.extra_body),
    )
    client = StreamingClient(target)
    try:
        models = await client.models()
    except RequestFailed as error:
        if flags.model is not None:  # some servers have no list
            return target, None
        raise ConfigError(f"{target.url}: {error}; is the server up, and is --url right?") from error
    finally:
        await client.close()
    if flags.model is None and not models:
        raise ConfigError(f"{target.url} lists no model; give --model")
    name = flags.model or next(iter(models))
    return replace(target, model=name), models.get(name)


async def _settled(flags: ServeBenchArgs, target: Target) -> Target:
    """Return the server with the request fields that it takes, found out by short requests."""
    prompts = _prompts(flags, run_number=-1)
    for i in range(max(1, flags.warmup)):
        body_of = partial(_warm_up_body, prompts, WorkloadRequest(0.0, 16, 4, index=i))
        target = await settle(target, body_of, flags.ready_s)
    return target


def _warm_up_body(prompts: PromptMaker, request: WorkloadRequest, target: Target) -> bytes:
    return Conversation(target, prompts, [request]).body(0)


def _extra(text: str | None) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"--extra-body {text!r} must be a JSON object")
    return value


def _prompts(flags: ServeBenchArgs, run_number: int) -> PromptMaker:
    """Return other tokens for each run: a run must not find its prompts in the prefix cache from the previous one."""
    # The lowest ids are special tokens and single bytes in most vocabularies.
    return PromptMaker(flags.vocab_size, flags.seed * 1000 + run_number + 1, min(256, flags.vocab_size // 2))


@dataclass(slots=True)
class _Bench:
    """Runs of one command against a server."""

    _flags: ServeBenchArgs
    _workload: Workload
    _slo: Slo | None
    target: Target
    _runs: int = 0

    def measure(self, workload: Workload, what: str) -> Outcome:
        """Send the workload. ``what``: the load, where it is a run of a sweep."""
        prompts, load = _prompts(self._flags, self._runs), make_load(self._flags, workload)
        self._runs += 1

        async def go() -> list[RequestRecord]:
            client = StreamingClient(self.target)
            try:
                with LiveProgress(len(workload.requests), what) as live:
                    return await Runner(client, prompts, load, live.observe).run(workload.requests)
            finally:
                await client.close()

        records = asyncio.run(go())
        summary = summarize(records, slo=self._slo, refused_rows=workload.refused)
        if what:
            console().print(
                f"offered {what:>10}  goodput {summary['goodput_per_s']:8.3g}/s  "
                f"TTFT p95 {show(summary['ttft_ms']['p95'])} ms  TPOT p95 {show(summary['tpot_ms']['p95'])} ms",
                highlight=False,
            )
        return Outcome(summary, records)

    def facts(self) -> dict[str, Any]:
        """Return what was measured, for the report."""
        flags, load = self._flags, make_load(self._flags, self._workload)
        limit = "" if load.concurrency is None else f" of {load.concurrency}"
        return {
            "url": self.target.request_url,
            "model": self.target.model,
            "workload": self._workload.source,
            "loop": ("closed" if load.closed else "open") + limit,
            "context": flags.max_model_len or "not told",
            "cancelled share": flags.cancel,
            "seed": flags.seed,
            "slo": str(self._slo) if self._slo else "none",
            "tokens counted by": "ids" if "return_token_ids" in self.target.optional else "chunks",
        }


WINDOW = 100  # requests over which the latencies shown are taken
REFRESH_S = 0.25


class LiveProgress:
    """Shows progress in one line on stderr where that is a terminal. `observe` takes every request and every record."""

    def __init__(self, total: int, what: str) -> None:
        self._bar = tqdm(total=total, desc=what, leave=False, disable=None)
        self._running = self._failed = self._tokens = 0
        self._last: list[RequestRecord] = []
        self._start_s = self._shown_s = time.monotonic()

    def __enter__(self) -> LiveProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def observe(self, what: WorkloadRequest | RequestRecord) -> None:
        """Count a request that was sent, or the record of one that ended."""
        if isinstance(what, WorkloadRequest):
            self._running += 1
        else:
            self._running -= 1
            self._failed += what.status == ERROR
            self._tokens += what.num_output_tokens
            self._last = [*self._last[1 - WINDOW :], what]
            self._bar.update()
        now_s = time.monotonic()
        if not self._bar.disable and now_s - self._shown_s >= REFRESH_S:
            self._shown_s = now_s
            self._bar.set_postfix_str(self.line(now_s))

    def line(self, now_s: float) -> str:
        """Return running and failed requests, tokens/s so far, and the median TTFT and TPOT of the last requests."""
        ttfts = [r.ttft_s for r in self._last if r.ttft_s is not None]
        tpots = [r.tpot_s for r in self._last if r.tpot_s is not None]
        tokens_per_s = self._tokens / max(1e-9, now_s - self._start_s)
        parts = [f"{self._running} running", f"{tokens_per_s:.0f} tokens/s"]
        parts += [f"TTFT {statistics.median(ttfts) * 1e3:.0f} ms"] if ttfts else []
        parts += [f"TPOT {statistics.median(tpots) * 1e3:.1f} ms"] if tpots else []
        parts += [f"{self._failed} failed"] if self._failed else []
        return ", ".join(parts)

"""`quire bench latency` and `quire bench throughput`: the engine in this process, without a server and without text.

Records and summary are the same as over HTTP.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.args import EngineArgs
from quire.clock import Clock, WallClock
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.engine.in_process import InProcessClient
from quire.executor.base import Executor
from quire.metrics.engine_stats import EngineStats
from quire.request import FinishReason, Request, SamplingParams, TokenEvent
from quire.scheduler.settings import PolicyChange
from quire.slo import Slo
from quire_lab.bench.args import LatencyArgs, ThroughputArgs, with_workload
from quire_lab.bench.page import console, print_summary, write
from quire_lab.bench.runs import DEFAULT_REQUESTS
from quire_lab.bench.summary import ERROR, OK, RequestRecord, Timing, summarize
from quire_lab.workload.build import Synthetic, from_trace
from quire_lab.workload.distributions import Fixed, parse_lengths
from quire_lab.workload.request import PromptMaker, WorkloadRequest
from quire_lab.workload.traces import read_trace


@dataclass(slots=True)
class _Running:
    """One request of a run."""

    work: WorkloadRequest
    timing: Timing
    queued_s: float = 0.0
    error: str | None = None

    def take(self, event: TokenEvent, now_s: float) -> None:
        if event.error is not None or event.finish_reason is FinishReason.ERROR:
            self.error = event.error_kind or "error"
        if event.token_ids:
            if self.timing.first_s is None and event.timing is not None:
                self.queued_s = event.timing.queued_s
                self.timing.num_cached_tokens = event.timing.num_cached_tokens
            self.timing.tokens(now_s, len(event.token_ids))

    def record(self, now_s: float) -> RequestRecord:
        status, end_s = (OK, self.timing.last_s) if self.error is None else (ERROR, now_s)
        arrival_s, error = self.work.arrival_s, self.error
        return self.timing.record(
            self.work, arrival_s=arrival_s, start_s=0.0, end_s=end_s, status=status, error=error
        )


@dataclass(slots=True)
class OfflineRun:
    """The result of a run: records in the order of its requests, and when each was admitted."""

    records: list[RequestRecord]
    admitted_s: dict[int, float]  # seconds, by index
    num_steps: int
    duration_s: float


class OfflineEngine:
    """A loaded model that runs workloads one after the other."""

    def __init__(self, args: EngineArgs, executor: str = "local", clock: Clock | None = None) -> None:
        """Load the model of ``args``. ``executor`` as `quire.engine.build` names them.

        Raises:
            ConfigError, ModelLoadError: the settings or the model are wrong.
        """
        self.config, _ = configure(args, detect_device())
        self._clock = clock or WallClock()
        self._client = InProcessClient(self.config, self._clock, executor=executor)
        self.info = self._client.wait_ready()
        self._num_sent = 0

    @property
    def max_model_len(self) -> int:
        return self.config.scheduler.max_model_len

    @property
    def executor(self) -> Executor:
        return self._client.core.executor

    def stats(self) -> EngineStats:
        return self._client.stats()

    def close(self) -> None:
        self._client.close()

    def change(self, change: PolicyChange) -> None:
        """Change the scheduler's settings from the next step on."""
        self._client.send(change)

    def prompts(self, seed: int) -> PromptMaker:
        """Return a maker of random token ids of this model's vocabulary; the first ids of many are special tokens."""
        vocab_size = self.config.model.spec.vocab_size
        return PromptMaker(vocab_size, seed, min(256, vocab_size // 2))

    def run(
        self,
        requests: Sequence[WorkloadRequest],
        prompts: PromptMaker,
        on_step: Callable[[float, EngineStats], None] | None = None,
    ) -> OfflineRun:
        """Run all requests at their arrival times, greedily and to their full lengths.

        ``on_step`` is called after each step with the seconds since the start and the engine's statistics.
        """
        waiting = [(r.arrival_s, i) for i, r in enumerate(requests)]
        heapq.heapify(waiting)
        made = [self._request(work, prompts) for work in requests]
        running: dict[str, _Running] = {}
        by_id = {request.request_id: i for i, request in enumerate(made)}
        records: dict[int, RequestRecord] = {}
        admitted: dict[int, float] = {}
        steps = self._client.stats().num_steps
        room = max(1, self.config.scheduler.max_queue)
        start_s = self._clock.now()
        while len(records) < len(requests):
            now_s = self._clock.now() - start_s
            # The queue, which protects servers, would refuse more at once; their arrival times stay as they are.
            while waiting and waiting[0][0] <= now_s and len(running) - len(records) < room:
                i = heapq.heappop(waiting)[1]
                self._client.send(replace(made[i], arrival_s=start_s + requests[i].arrival_s))
                running[made[i].request_id] = _Running(requests[i], Timing(now_s))
            pause_s = max(0.0, waiting[0][0] - now_s) if waiting else None
            events = self._client.receive(pause_s)
            now_s = self._clock.now() - start_s
            for event in events:
                state = running[event.request_id]
                state.take(event, now_s)
                if event.finish_reason is not None:
                    records[by_id[event.request_id]] = state.record(now_s)
                    admitted[state.work.index] = state.work.arrival_s + state.queued_s
            if on_step is not None:
                on_step(now_s, self._client.stats())
        return OfflineRun(
            [records[i] for i in range(len(requests))],
            admitted,
            self._client.stats().num_steps - steps,
            self._clock.now() - start_s,
        )

    def _request(self, work: WorkloadRequest, prompts: PromptMaker) -> Request:
        self._num_sent += 1
        return Request(
            request_id=str(self._num_sent),
            prompt_token_ids=tuple(prompts.token_ids(work)),
            sampling=SamplingParams(
                temperature=0.0, max_tokens=work.num_output_tokens, ignore_eos=True, seed=self._num_sent
            ),
            arrival_s=0.0,
        )


def latency(engine_args: EngineArgs, args: LatencyArgs) -> int:
    """Time batches of equal requests that start together; every request of every counted batch is one record."""
    args = with_workload(args)
    engine = OfflineEngine(engine_args)
    synthetic = Synthetic(args.batch_size, Fixed(args.input_len), Fixed(args.output_len))
    batch = synthetic.build(engine_args.seed, engine.max_model_len)
    records: list[RequestRecord] = []
    duration_s = 0.0
    for i in range(args.warmup + args.iterations):
        # Other tokens each time: a batch must not find the previous one in the prefix cache.
        done = engine.run(batch.requests, engine.prompts(engine_args.seed + i))
        if i >= args.warmup:
            records += done.records
            duration_s += done.duration_s
    engine.close()
    summary = summarize(records, duration_s=duration_s, refused_rows=batch.refused)
    summary["run"] = {"kernels": engine.info.kernels, "workload": batch.source, "batches": args.iterations}
    title = f"{engine_args.model}: {args.iterations} batches of {args.batch_size}, {engine.info.kernels}"
    return _report(title, summary, args.json)


def throughput(engine_args: EngineArgs, args: ThroughputArgs) -> int:
    """Run all requests at once and print tokens/s."""
    args = with_workload(args)
    slo = Slo.parse(args.slo) if args.slo else None
    trace = None if args.trace is None else read_trace(args.trace)
    engine = OfflineEngine(engine_args)
    if trace is None:
        lengths = parse_lengths(args.input_len, "--input-len"), parse_lengths(args.output_len, "--output-len")
        synthetic = Synthetic(args.limit or DEFAULT_REQUESTS, *lengths)
        workload = synthetic.build(engine_args.seed, engine.max_model_len)
    else:
        workload = from_trace(trace, limit=args.limit, max_model_len=engine.max_model_len, time_scale=0.0)
    done = engine.run(workload.requests, engine.prompts(engine_args.seed))
    engine.close()
    summary = summarize(done.records, slo=slo, duration_s=done.duration_s, refused_rows=workload.refused)
    summary["run"] = {"kernels": engine.info.kernels, "workload": workload.source, "steps": done.num_steps}
    title = f"{engine_args.model}: {workload.source}, {done.num_steps} steps, {engine.info.kernels}"
    return _report(title, summary, args.json)


def _report(title: str, summary: dict[str, Any], path: str | None) -> int:
    """Print the summary and write it to ``path``; return the exit status."""
    out = console()
    out.print(title)
    print_summary(out, summary)
    if path:
        write(path, json.dumps(summary, indent=2) + "\n")
    return 0 if summary["num_completed"] else 1

"""`quire bench latency` and `quire bench throughput`: the engine in this process, without a server."""

from __future__ import annotations

import json
from typing import Any

from quire.args import EngineArgs
from quire.bench.offline import OfflineEngine
from quire.bench.offline_args import LatencyArgs, ThroughputArgs
from quire.bench.page import write
from quire.bench.summary import RequestRecord, summarize
from quire.bench.table import console, print_summary
from quire.workload.build import Synthetic, from_trace
from quire.workload.lengths import Fixed, parse_lengths
from quire.workload.slo import Slo
from quire.workload.traces import read_trace

DEFAULT_REQUESTS = 100


def latency(engine_args: EngineArgs, args: LatencyArgs) -> int:
    """Time batches of equal requests that start together; every request of every counted batch is one record."""
    engine = OfflineEngine(engine_args)
    batch = Synthetic(args.batch_size, Fixed(args.input_len), Fixed(args.output_len)).build(
        engine_args.seed, engine.max_model_len
    )
    records: list[RequestRecord] = []
    duration_s = 0.0
    for i in range(args.warmup + args.iterations):
        # Other tokens each time: a batch must not find the one before in the prefix cache.
        done = engine.run(batch.requests, engine.prompts(engine_args.seed + i))
        if i >= args.warmup:
            records += done.records
            duration_s += done.duration_s
    engine.close()
    summary = summarize(records, duration_s=duration_s, refused_rows=batch.refused)
    summary["run"] = {"kernels": engine.info.kernels, "workload": batch.source, "batches": args.iterations}
    title = f"{engine_args.model}: {args.iterations} batches of {args.batch_size}, {engine.info.kernels}"
    return _told(title, summary, args.json)


def throughput(engine_args: EngineArgs, args: ThroughputArgs) -> int:
    """All requests at once: tokens a second."""
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
    return _told(title, summary, args.json)


def _told(title: str, summary: dict[str, Any], path: str | None) -> int:
    """Print the summary, and write it; return the exit status."""
    out = console()
    out.print(title)
    print_summary(out, summary)
    if path:
        write(path, json.dumps(summary, indent=2) + "\n")
    return 0 if summary["num_completed"] else 1

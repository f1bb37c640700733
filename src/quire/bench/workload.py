"""The workload that the flags of `quire bench serve` and `quire simulate` describe."""

from __future__ import annotations

from quire.bench.serve_args import ServeBenchArgs
from quire.errors import ConfigError
from quire.workload.arrivals import Arrivals
from quire.workload.build import Synthetic, from_trace, with_cancellations
from quire.workload.lengths import parse_lengths
from quire.workload.request import Workload
from quire.workload.traces import read_trace

DEFAULT_REQUESTS = 100


def make_workload(flags: ServeBenchArgs) -> Workload:
    """The requests that the flags describe."""
    arrivals = None
    if flags.rate is not None or flags.sweep:
        arrivals = Arrivals(flags.rate or 1.0, flags.burstiness, flags.ramp_to)
    elif flags.burstiness != 1.0 or flags.ramp_to is not None:
        raise ConfigError("--burstiness and --ramp-to need --rate")
    if flags.trace is not None:
        trace = read_trace(flags.trace)
        if flags.sweep and flags.rate is None and trace.timed:
            arrivals = None  # the trace's own times, stretched
        workload = from_trace(
            trace,
            limit=flags.limit,
            max_model_len=flags.max_model_len,
            arrivals=arrivals,
            time_scale=flags.time_scale,
            seed=flags.seed,
        )
    elif flags.time_scale != 1.0:
        raise ConfigError("--time-scale stretches the times of a --trace")
    else:
        workload = Synthetic(
            flags.limit or DEFAULT_REQUESTS,
            parse_lengths(flags.input_len, "--input-len"),
            parse_lengths(flags.output_len, "--output-len"),
            arrivals or Arrivals(),
            flags.prefix_len,
            flags.num_prefixes,
            flags.turns,
            flags.think_s,
        ).build(flags.seed, flags.max_model_len)
    return with_cancellations(workload, flags.cancel, flags.seed) if flags.cancel else workload

"""``--workload`` is one name for lengths and traces, at every command that takes a load."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire_lab.bench.args import (
    LatencyArgs,
    ServeBenchArgs,
    SpeculateBenchArgs,
    ThroughputArgs,
    with_workload,
)
from quire_lab.bench.runs import make_workload
from quire_lab.cli.plan import mean_lengths

EQUAL = (LatencyArgs, SpeculateBenchArgs)
MIXED = (ServeBenchArgs, ThroughputArgs)


@pytest.mark.parametrize("kind", EQUAL + MIXED)
def test_lengths_are_taken_by_every_command(kind: type) -> None:
    args = with_workload(kind(workload="64/16"))
    assert (str(args.input_len), str(args.output_len)) == ("64", "16")
    assert mean_lengths("64/16") == (64, 16)


@pytest.mark.parametrize("kind", MIXED)
def test_a_trace_and_distributions_are_loads_too(kind: type, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100, "output_length": 10, "hash_ids": [0]}\n')
    assert with_workload(kind(workload=str(trace))).trace == str(trace)
    args = with_workload(kind(workload="uniform:10,30/lognormal:20,0.5,64"))
    assert (args.input_len, args.output_len) == ("uniform:10,30", "lognormal:20,0.5,64")
    assert mean_lengths("uniform:10,30/16") == (20, 16)
    assert mean_lengths(str(trace)) == (100, 10)


def test_the_load_has_these_lengths() -> None:
    workload = make_workload(ServeBenchArgs(workload="64/16", limit=3))
    assert [(r.num_prompt_tokens, r.num_output_tokens) for r in workload.requests] == [(64, 16)] * 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (ServeBenchArgs(workload="64x16"), "'64x16' must be PROMPT/OUTPUT in tokens, such as 1024/256"),
        (ServeBenchArgs(workload="no/such.csv"), "'no/such.csv': prompt = 'no' is not a distribution"),
        (ServeBenchArgs(workload="64/16", input_len="8"), "--workload 64/16 and --input-len"),
        (ThroughputArgs(workload="64/16", trace="x"), "--workload 64/16 and --trace"),
        (LatencyArgs(workload="uniform:1,2/16"), "requests are equal here"),
        (SpeculateBenchArgs(workload=__file__), "a trace is not taken here"),
    ],
)
def test_what_is_none_is_refused(args: ServeBenchArgs, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        with_workload(args)
    assert message in str(error.value)

"""The offline benchmarks: the real scheduler over the fake executor, and Quill where a command is run whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import batching
from benchmarks.startup import startup
from tests.fakes.engine import FAKE

from quire.args import EngineArgs
from quire.errors import ConfigError
from quire_lab.bench.args import LatencyArgs, ThroughputArgs
from quire_lab.bench.offline import OfflineEngine, latency, throughput
from quire_lab.bench.summary import RequestRecord
from quire_lab.workload.build import Synthetic
from quire_lab.workload.distributions import Fixed, LogNormal
from quire_lab.workload.request import WorkloadRequest

pytestmark = pytest.mark.component


@pytest.fixture(scope="module")
def engine() -> Iterator[OfflineEngine]:
    args = EngineArgs(num_kv_blocks=512, max_num_seqs=4, max_queue=5, enable_prefix_caching=False)
    made = OfflineEngine(args, executor=f"{FAKE}@1")
    yield made
    made.close()


def test_records_of_an_offline_run(engine: OfflineEngine) -> None:
    """More requests than the queue holds; one of them late."""
    work = [WorkloadRequest(0.0, 20, 6, i) for i in range(12)] + [WorkloadRequest(0.1, 20, 3, 12)]
    done = engine.run(work, engine.prompts(0))
    assert [(r.index, r.status, r.num_output_tokens) for r in done.records] == [
        (i, "ok", 6 if i < 12 else 3) for i in range(13)
    ]
    for record in done.records:
        assert len(record.itl_s) == record.num_output_tokens - 1
        assert (
            record.arrival_s <= done.admitted_s[record.index] <= (record.first_token_s or 0.0) <= record.end_s
        )
    assert done.records[12].arrival_s == 0.1
    assert done.num_steps >= 18


def test_gates_differ_as_they_should(engine: OfflineEngine) -> None:
    """Counted in steps, which no machine is slow at: static waits for the longest, continuous fills the slots."""
    workload = Synthetic(24, Fixed(8), LogNormal(8, 1.0, 60)).build(3)
    runs = {name: batching.run_gate(engine, workload, name, change) for name, change in batching.ways(4)}
    steps = {name: run.num_steps for name, run in runs.items()}
    total = sum(r.num_output_tokens for r in workload.requests)
    assert steps["one at a time"] >= total
    assert steps["continuous"] < steps["static"] < steps["one at a time"]
    assert steps["static"] <= steps["dynamic"] + 24
    assert max(runs["one at a time"].running) == 1
    assert max(runs["continuous"].running) == 4
    assert len(runs["static"].slots) <= 4
    values = batching.as_dict(list(runs.values()), None)
    assert values["gates"]["static"]["over_static"] == 1.0
    assert values["gates"]["continuous"]["over_static"] > 1.0
    assert 0.0 < values["gates"]["continuous"]["slots_busy"] <= 1.0


def test_the_decode_curve_and_the_report(engine: OfflineEngine) -> None:
    curve = batching.decode_curve(engine, 24)
    assert curve.tokens == list(range(1, 25))
    assert curve.with_cache_s == sorted(curve.with_cache_s)
    runs = [
        batching.run_gate(engine, Synthetic(4, Fixed(8), Fixed(3)).build(0), name, change)
        for name, change in batching.ways(4)
    ]
    figures = batching.as_dict(runs, curve) | {"run": {"workload": "w", "kernels": "k"}}
    html = batching.report("quill", json.loads(json.dumps(figures)), runs, curve)
    assert html.count("<svg") == 6


def test_slots_are_reused_lowest_first() -> None:
    records = [RequestRecord(i, 0.0, 0.0, end, 1, 1) for i, end in enumerate((2.0, 1.0, 3.0, 4.0))]
    slots = batching.assign_slots(records, {0: 0.0, 1: 0.0, 2: 1.0, 3: 2.5})
    assert slots == [[(0.0, 2.0), (2.5, 1.5)], [(0.0, 1.0), (1.0, 2.0)]]


def test_growth_finds_the_exponent() -> None:
    tokens = list(range(1, 400))
    assert batching.growth(tokens, [3.0 * t**2 for t in tokens]) == pytest.approx(2.0)
    assert batching.growth(tokens, [0.1 * t for t in tokens]) == pytest.approx(1.0)
    assert batching.interpolate([1, 5], [10.0, 30.0], 2) == 15.0
    assert batching.interpolate([1, 5], [10.0, 30.0], 9) == 30.0


def test_latency_and_throughput_on_quill(tmp_path: Path) -> None:
    small = EngineArgs(num_kv_blocks=128, max_model_len=512, threads=1)
    out = str(tmp_path / "a.json")
    assert (
        latency(
            small, LatencyArgs(input_len=16, output_len=4, batch_size=2, warmup=1, iterations=2, json=out)
        )
        == 0
    )
    found = json.loads(Path(out).read_text())
    assert (found["num_completed"], found["num_output_tokens"], found["num_cached_tokens"]) == (4, 16, 0)
    with pytest.raises(ConfigError, match="fits the context"):
        throughput(small, ThroughputArgs(limit=3, input_len="8", output_len="600"))


def test_throughput_of_a_trace(tmp_path: Path) -> None:
    trace, out = tmp_path / "t.csv", str(tmp_path / "a.json")
    trace.write_text("num_prefill_tokens,num_decode_tokens\n5,3\n9000,1\n7,2\n")
    small = EngineArgs(num_kv_blocks=128, max_model_len=512, threads=1)
    assert throughput(small, ThroughputArgs(trace=str(trace), slo="e2el=60s", json=out)) == 0
    found = json.loads(Path(out).read_text())
    assert (found["num_output_tokens"], found["refused_rows"]) == (5, {"longer than the context": 1})
    assert found["goodput_per_s"] == found["requests_per_s"]


def test_a_server_that_does_not_start_is_one_line() -> None:
    with pytest.raises(ConfigError, match="no file or folder"):
        startup("/no/such/model", [], rounds=1)


@pytest.mark.slow
def test_startup_of_quill(tmp_path: Path) -> None:
    out = tmp_path / "a.json"
    assert startup("quill", ["--num-kv-blocks", "64"], rounds=1, idle_s=0.5, path=str(out), is_cold=True) == 0
    found = json.loads(out.read_text())
    assert 0.0 < found["ready_s"] < found["first_token_s"]
    assert found["engine_peak_mib"] > found["engine_pss_mib"] / 2 > 10

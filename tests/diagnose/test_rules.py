"""The rules on figures of healthy and of limited servers, four of which were recorded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire_lab.diagnose.figures import Figures, figures, quantile
from quire_lab.diagnose.read import Reading, parse_metrics
from quire_lab.diagnose.rules import diagnose

READINGS = sorted((Path(__file__).parent / "readings").glob("*.json"))
HEALTHY = Figures(
    model="m", seconds=5.0, requests=50.0, prompt_tokens=5_000.0, output_tokens=5_000.0, running=12.0, waiting=0.0,
    kv_usage=0.3, kv_blocks=4096.0, kv_full=0.0, slots_full=0.0, idle_slots=0.0, max_num_seqs=64,
    max_num_batched_tokens=512, long_tokens=None, gate="continuous", prefix_caching=True, preemptions=0.0,
    recomputed=0.0, hit_rate=0.0,
    shared=0.0, prompt_share=0.3, chunks_per_prompt=0.0, chunk_tokens=100.0, chunk_step_s=0.02, decode_step_s=0.01,
    ttft_s=0.04, queue_s=0.005, itl_s=0.012, itl_p50_s=0.01, itl_p99_s=0.022, host_share=0.05, step_s=0.011,
    draft_share=0.0, drafted=0.0, accepted=0.0, draft_gain=1.0, computed_tokens=10_000.0, rejected=0.0, deadlines=0.0,
    slo_missed=0.0, api_cores=0.1, load_per_core=0.5,
)  # fmt: skip


def first(**changed: Any) -> str | None:
    found = diagnose(replace(HEALTHY, **changed))
    assert all(each.because and each.change for each in found.findings)
    return found.findings[0].name if found.findings else None


@pytest.mark.parametrize("path", READINGS, ids=lambda path: path.stem)
def test_recorded_servers_are_named_first(path: Path) -> None:
    found = diagnose(figures(Reading(**json.loads(path.read_text()))))
    assert found.verdict == "limited"
    assert found.findings[0].name == path.stem


def test_four_servers_were_recorded() -> None:
    assert len(READINGS) == 4


def test_the_gate_is_read_without_the_live_feed() -> None:
    given = json.loads((READINGS[-1]).read_text())
    assert given["live"][-1]["limits"]["gate"] == "static"
    polled = [
        {
            "vllm:num_requests_running": m["gauges"]["num_running"],
            "vllm:num_requests_waiting": m["gauges"]["num_waiting"],
            "vllm:kv_cache_usage_perc": 0.01,
        }
        for m in given["live"]
    ]
    bare = Reading(**{**given, "live": [], "polled": polled})
    assert diagnose(figures(bare)).findings[0].name == "static-batching"


def test_a_healthy_server_is_limited_by_nothing() -> None:
    assert diagnose(HEALTHY).verdict == "fine"


def test_a_server_without_load_is_idle() -> None:
    assert diagnose(replace(HEALTHY, computed_tokens=0.0, running=0.0)).verdict == "idle"
    assert diagnose(replace(HEALTHY, computed_tokens=0.0)).verdict == "no-step"


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("too-few-slots", {"running": 8.0, "waiting": 40.0, "slots_full": 1.0, "max_num_seqs": 8}),
        ("overloaded", {"rejected": 30.0}),
        ("overloaded", {"waiting": 30.0, "queue_s": 2.0, "ttft_s": 2.1}),
        ("overloaded", {"slo_missed": 0.4}),
        (
            "speculation-does-not-pay",
            {"drafted": 9e3, "accepted": 0.1, "draft_gain": 0.8, "draft_share": 0.3},
        ),
        ("host-overhead", {"host_share": 0.5}),
        ("host-overhead", {"api_cores": 0.97}),
        ("busy-machine", {"load_per_core": 4.0}),
        ("busy-machine", {"prompt_share": 0.0, "itl_p99_s": 0.2, "itl_s": 0.03}),
        ("prefix-cache-too-small", {"shared": 0.9, "hit_rate": 0.1}),
        ("chunk-too-small", {"chunks_per_prompt": 20.0, "max_num_batched_tokens": 16, "chunk_step_s": 0.012}),
    ],
)
def test_each_limit_has_its_finding(name: str, changed: dict[str, Any]) -> None:
    assert first(**changed) == name


@pytest.mark.parametrize(
    ("threshold", "chunk_tokens", "setting"),
    [
        (108, 108.0, "--long-prefill-token-threshold 432 (it is 108)"),
        (0, 108.0, "--max-num-batched-tokens 2048 (it is 512)"),
        (None, 108.0, "--max-num-batched-tokens 2048 (it is 512)"),
        (108, 500.0, "--max-num-batched-tokens 2048 (it is 512)"),  # short prompts fill the steps
    ],
)
def test_small_chunks_name_what_cuts_them(threshold: int | None, chunk_tokens: float, setting: str) -> None:
    cut = {"chunks_per_prompt": 20.0, "chunk_step_s": 0.012, "long_tokens": threshold}
    (found,) = diagnose(replace(HEALTHY, chunk_tokens=chunk_tokens, **cut)).findings
    assert found.name == "chunk-too-small"
    assert found.change[0].startswith(setting)


def test_paying_drafts_are_no_finding() -> None:
    assert first(drafted=9e3, accepted=0.7, draft_gain=1.6, draft_share=0.1) is None


def test_overload_comes_behind_what_causes_it() -> None:
    found = diagnose(replace(HEALTHY, waiting=30.0, queue_s=2.0, ttft_s=2.1, kv_full=1.0, kv_usage=0.97))
    assert [each.name for each in found.findings] == ["kv-cache-too-small", "overloaded"]


def test_quantiles_are_of_what_is_new() -> None:
    text = '# TYPE x histogram\nx_bucket{{engine="0",le="1.0"}} {}\nx_bucket{{engine="0",le="2.0"}} {}\n'
    text += 'x_bucket{{engine="0",le="+Inf"}} {}\n'
    before, after = parse_metrics(text.format(100, 100, 100)), parse_metrics(text.format(100, 108, 110))
    assert quantile(before, after, "x", 0.4) == pytest.approx(1.5)
    assert quantile(before, after, "x", 0.99) == 2.0
    assert quantile(after, after, "x", 0.5) == 0.0

"""What the live page shows in figures: rates over real intervals, red at the SLO alone, failures, restarts, memory."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

pytest.importorskip("nicegui", reason="the extra `cockpit` is not installed")

from quire_lab.cockpit.figures import count, percent, seconds, size
from quire_lab.cockpit.readings import Readings, quantile

BOUNDS = [0.01, 0.1, 1.0]
GAUGES = {
    "num_running": 0, "num_waiting": 0, "num_blocks": 100, "num_free_blocks": 100, "num_idle_blocks": 0,
    "num_prompt_tokens": 0, "num_cached_tokens": 0, "num_generated_tokens": 0, "num_preemptions": 0, "num_refused": 0,
    "num_failed": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0, "num_loaded_blocks": 0, "num_stored_blocks": 0,
}  # fmt: skip


def message(t: float, since: float, *, counts: dict[str, list[int]] | None = None, **values: Any) -> str:
    """A message of the feed; ``values`` replace gauges, or members of the message."""
    gauges = {name: values.pop(name, default) for name, default in GAUGES.items()}
    said = {
        "t": t, "since": since, "gauges": gauges, "limits": {"max_num_seqs": 8},
        "steps": {"count": 4, "prompt_tokens": 10, "plan_s": 0.0, "compute_s": 0.02, "draft_s": 0.0, "apply_s": 0.0},
        "model": {"slo": {"ttft": 0.5, "tpot": 0.05}}, "answers": [], "restarts": 0, "memory_bytes": 3 << 30,
        "latency": {
            key: {"bounds": BOUNDS, "counts": (counts or {}).get(key, [0, 0, 0, 0])} for key in ("ttft", "itl", "tpot")
        },
    }  # fmt: skip
    return msgspec.json.encode(said | values).decode()


def tile(reading: dict[str, Any], name: str) -> dict[str, Any]:
    return next(each for each in reading["tiles"] if each["name"].startswith(name))


def test_a_rate_is_over_the_time_that_passed() -> None:
    readings = Readings()
    assert readings.take(message(10.0, 10.0))["point"] is None
    reading = readings.take(message(10.25, 10.0, num_generated_tokens=25))
    assert reading["point"]["made"] == pytest.approx(100)
    assert reading["point"]["prompt"] == pytest.approx(40)
    assert tile(reading, "generated")["value"] == "100"


def test_a_short_interval_is_counted_to_the_next_one() -> None:
    """2.7 million tokens per second were shown when the interval was 0 and taken as 1 ms."""
    readings = Readings()
    readings.take(message(10.0, 10.0))
    reading = readings.take(message(10.001, 10.0, num_generated_tokens=100))
    assert reading["point"] is None
    assert tile(reading, "generated")["value"] == "–"
    reading = readings.take(message(10.25, 10.001, num_generated_tokens=125))
    assert reading["point"]["made"] == pytest.approx(500)
    assert reading["point"]["prompt"] == pytest.approx(80)


def test_a_pause_of_the_reader_gives_no_rate() -> None:
    readings = Readings()
    readings.take(message(10.0, 10.0))
    assert readings.take(message(70.0, 70.0, num_generated_tokens=2700))["point"] is None
    reading = readings.take(message(70.25, 70.0, num_generated_tokens=2710))
    assert reading["point"]["made"] == pytest.approx(40)


def test_another_engine_begins_anew() -> None:
    readings = Readings()
    readings.take(message(10.0, 10.0, num_generated_tokens=500))
    reading = readings.take(message(12.0, 11.9, num_generated_tokens=3, restarts=1))
    assert reading["is_new"]
    assert reading["point"] is None


def test_a_panel_is_red_beyond_its_slo_alone() -> None:
    readings = Readings()
    readings.take(message(10.0, 10.0))
    wide = {"ttft": [50, 50, 0, 0], "itl": [50, 0, 50, 0], "tpot": [90, 10, 0, 0]}
    latency = readings.take(message(10.25, 10.0, counts=wide))["latency"]
    assert latency["ttft"]["p99"] > 9 * latency["ttft"]["p50"]
    assert {key: each["is_over"] for key, each in latency.items()} == {
        "ttft": False,
        "itl": False,
        "tpot": True,
    }
    assert "SLO 50 ms: exceeded" in latency["tpot"]["said"]


def test_nothing_is_red_without_an_slo() -> None:
    readings = Readings()
    slow = {"ttft": [0, 0, 9, 9], "itl": [0, 0, 9, 9], "tpot": [0, 0, 9, 9]}
    latency = readings.take(message(10.0, 10.0, counts=slow, model={"slo": {}}))["latency"]
    assert not any(each["is_over"] for each in latency.values())
    assert "since the server started" in latency["ttft"]["said"]


def test_a_panel_judges_the_last_minute() -> None:
    readings = Readings()
    readings.take(message(0.0, 0.0))
    slow = {"ttft": [0, 0, 5, 0]}
    assert readings.take(message(1.0, 0.75, counts=slow))["latency"]["ttft"]["is_over"]
    for t in range(2, 70):
        counts = {"ttft": [t, 0, 5, 0]}
        reading = readings.take(message(float(t), t - 0.25, counts=counts))
    assert not reading["latency"]["ttft"]["is_over"]
    assert "last minute" in reading["latency"]["ttft"]["said"]


def test_failures_restarts_and_memory_are_shown() -> None:
    readings = Readings()
    path = "/v1/chat/completions"
    readings.take(message(1.0, 1.0, answers=[(path, "200", 50), (path, "500", 7)]))
    answers = [(path, "200", 97), (path, "400", 2), (path, "500", 8)]
    reading = readings.take(message(1.25, 1.0, answers=answers))
    assert tile(reading, "failed of 50") == {
        "name": "failed of 50, last minute",
        "value": "2.0 %",
        "alarm": True,
    }
    assert tile(reading, "memory")["value"] == "3 GiB"
    assert not tile(reading, "engine restarts")["alarm"]
    reading = readings.take(message(1.5, 1.25, restarts=2))
    assert tile(reading, "engine restarts") == {"name": "engine restarts", "value": "2", "alarm": True}


def test_a_stream_that_fails_after_its_200_is_a_failure() -> None:
    readings = Readings()
    readings.take(message(1.0, 1.0))
    reading = readings.take(message(1.25, 1.0, answers=[("/v1/completions", "200", 4)], num_failed=1))
    assert tile(reading, "failed of 4")["value"] == "25 %"


def test_quantiles_are_interpolated() -> None:
    assert quantile(BOUNDS, [10, 0, 0, 0], 0.5) == pytest.approx(0.005)
    assert quantile(BOUNDS, [0, 0, 0, 3], 0.5) == 1.0
    assert quantile(BOUNDS, [0, 0, 0, 0], 0.5) is None


def test_figures_have_three_digits_and_a_unit() -> None:
    assert [count(v) for v in (None, 7, 0.25, 12.34, 940.2, 12_345, 2.7e6)] == [
        "–", "7", "0.25", "12.3", "940", "12.3k", "2.7M",
    ]  # fmt: skip
    assert [seconds(v) for v in (None, 0.0042, 0.25, 2.345, 61.0)] == [
        "–",
        "4.2 ms",
        "250 ms",
        "2.3 s",
        "61 s",
    ]
    assert [percent(1, 40), percent(1, 2), percent(0, 9), percent(1, 0)] == ["2.5 %", "50 %", "0 %", "–"]
    assert size(3.5 * (1 << 30)) == "3.5 GiB"

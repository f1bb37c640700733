"""The summary against hand-computed values and numpy's percentiles."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from quire.slo import Slo
from quire_lab.bench.summary import CANCELLED, ERROR, RequestRecord, distribution, summarize

RECORDS = [
    RequestRecord(0, 0.0, 0.1, 1.4, 10, 5, 0.4, (0.25, 0.25, 0.25, 0.25)),
    RequestRecord(1, 1.0, 1.0, 2.0, 20, 1, 2.0),
    RequestRecord(2, 1.5, 1.5, 3.0, 30, 3, 2.0, (0.5, 0.5), status=CANCELLED),
    RequestRecord(3, 2.0, 2.0, 4.0, 40, 0, None, status=ERROR, error="http 503"),
]


def test_definitions() -> None:
    first, single = RECORDS[:2]
    assert first.ttft_s == pytest.approx(0.4)  # from the intended send time, not from the late one
    assert first.tpot_s == pytest.approx((1.4 - 0.4) / 4)
    assert (single.tpot_s, single.ttft_s, single.e2el_s) == (None, 1.0, 1.0)
    assert RECORDS[3].as_dict()["ttft_ms"] is None
    assert first.as_dict()["e2el_ms"] == pytest.approx(1400)


def test_summary() -> None:
    summary = summarize(RECORDS, slo=Slo(ttft_s=0.5, tpot_s=0.3), refused_rows={"no output tokens": 3})
    assert summary["ttft_ms"]["mean"] == pytest.approx(700)
    assert summary["ttft_ms"]["p50"] == pytest.approx(700)
    assert summary["tpot_ms"]["p99"] == pytest.approx(250)
    assert summary["itl_ms"]["p90"] == pytest.approx(250)
    assert summary["requests_per_s"] == pytest.approx(2 / 4.0)
    assert summary["goodput_per_s"] == pytest.approx(1 / 4.0)
    assert summary["output_tokens_per_s"] == pytest.approx(9 / 4.0)
    assert summary["input_tokens_per_s"] == pytest.approx(60 / 4.0)
    assert summary["slo"] == {"ttft_ms": 500.0, "tpot_ms": 300.0}
    counts = [summary[f"num_{k}"] for k in ("requests", "completed", "cancelled", "failed", "refused_rows")]
    assert counts == [4, 2, 1, 1, 3]
    assert summary["errors"] == {"http 503": 1}
    assert summarize(RECORDS)["goodput_per_s"] == summary["requests_per_s"]
    json.dumps(summary, allow_nan=False)


def test_nothing_completed_is_not_zero_latency() -> None:
    summary = summarize(RECORDS[3:])
    assert set(summary["ttft_ms"].values()) == {None}
    assert summary["requests_per_s"] == 0.0
    assert summarize([])["duration_s"] == 0.0


def test_percentiles_are_numpys() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for num in (1, 2, 3, 100, 997):
        values = [rng.expovariate(1.0) for _ in range(num)]
        found = distribution(values)
        for percent in (50, 90, 95, 99):
            assert found[f"p{percent}"] == pytest.approx(1e3 * float(np.percentile(values, percent)))
        assert found["mean"] == pytest.approx(1e3 * float(np.mean(values)))

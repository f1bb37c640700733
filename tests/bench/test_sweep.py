"""The search for the knee on curves whose knee is known."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from quire.bench.report import sweep_report
from quire.bench.serve import run
from quire.bench.serve_args import ServeBenchArgs
from quire.bench.summary import RequestRecord, summarize
from quire.bench.sweep import knee, sweep
from quire.errors import ConfigError


def curve(goodput: Callable[[float], float], asked: list[float]) -> Callable[[float], Mapping[str, Any]]:
    def run(rate: float) -> Mapping[str, Any]:
        asked.append(rate)
        return {"offered_per_s": rate, "goodput_per_s": goodput(rate)}

    return run


@pytest.mark.parametrize("capacity", [3.0, 10.0, 37.0])
def test_a_collapse_is_found_within_a_fifth(capacity: float) -> None:
    asked: list[float] = []
    points = sweep(curve(lambda r: r if r <= capacity else 0.2 * capacity, asked), 1.0)
    assert capacity / 1.2 <= knee(points)["offered_per_s"] <= capacity
    assert len(asked) == len(set(asked)) <= 12


def test_a_plateau_ends_the_sweep() -> None:
    asked: list[float] = []
    points = sweep(curve(lambda r: min(r, 10.0), asked), 1.0)
    assert 9.5 <= knee(points)["offered_per_s"] <= 16.0
    assert max(asked) <= 64.0


def test_the_report_of_a_sweep_is_one_file() -> None:
    pytest.importorskip("matplotlib")
    records = [RequestRecord(i, 0.1 * i, 0.1 * i, i + 1.0, 5, 3, i + 0.5, (0.2, 0.3)) for i in range(4)]
    records.append(RequestRecord(4, 0.0, 0.0, 1.0, 5, 0, status="error", error="<http 503>"))
    points = [summarize(records) | {"offered_per_s": rate} for rate in (1.0, 2.0)]
    html = sweep_report("a <title>", {"url": "http://x"}, points, knee(points), records)
    assert html.count("<svg") == 11
    assert "<http 503>" not in html
    assert "failed: &lt;http 503&gt;" in html
    assert "<script" not in html
    assert html == sweep_report("a <title>", {"url": "http://x"}, points, knee(points), records)


def test_plots_without_matplotlib_are_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire\[bench\]'"):
        run(ServeBenchArgs(url="http://127.0.0.1:9", html="x.html"))


def test_nothing_good_ends_it_too() -> None:
    asked: list[float] = []
    points = sweep(curve(lambda r: 0.0, asked), 1.0)
    assert len(asked) <= 6
    assert knee(points)["goodput_per_s"] == 0.0

"""The search for the knee on curves whose knee is known."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from quire.slo import Slo
from quire_lab.bench.figures import BOTTOM, HEIGHT, TOP, Axis, Series, chart
from quire_lab.bench.page import sweep_charts, sweep_report
from quire_lab.bench.runs import knee, sweep
from quire_lab.bench.summary import RequestRecord, summarize


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
    records = [RequestRecord(i, 0.1 * i, 0.1 * i, i + 1.0, 5, 3, i + 0.5, (0.2, 0.3)) for i in range(4)]
    records.append(RequestRecord(4, 0.0, 0.0, 1.0, 5, 0, status="error", error="<http 503>"))
    points = [summarize(records) | {"offered_per_s": rate} for rate in (1.0, 2.0)]
    html = sweep_report("a <title>", {"url": "http://x"}, points, knee(points), records)
    assert html.count("<svg") == 12
    assert "<http 503>" not in html
    assert "failed: &lt;http 503&gt;" in html
    assert "<script" not in html
    assert html == sweep_report("a <title>", {"url": "http://x"}, points, knee(points), records)


def test_the_report_of_a_sweep_shows_its_limits() -> None:
    records = [RequestRecord(i, 0.1 * i, 0.1 * i, i + 1.0, 5, 3, i + 0.5, (0.2, 0.3)) for i in range(4)]
    points = [summarize(records) | {"offered_per_s": rate} for rate in (1.0, 2.0)]
    slo = Slo.parse("ttft=90s,tpot=50ms")
    html = sweep_report("t", {}, points, knee(points), records, slo)
    assert html.count("SLO 9e+04 ms") == html.count("SLO 50 ms") == 1
    heights = [float(y) for y in re.findall(r'd="M58 ([\d.]+)H', html)]
    assert all(46 <= y <= 380 - 40 for y in heights), "a limit is within the axes"


def test_plots_keep_within_the_axes_and_show_no_nan() -> None:
    lines = [
        Series("a", [1.0, 2.0, 3.0], [0.0, math.inf, 5.0], "points"),
        Series("b & c", [float(i) for i in range(9000)], [1.0] * 9000, "steps"),
        Series("", [], []),
    ]
    for log in (False, True):
        svg = chart(lines, title="T", x="x", y="y", log_x=log, log_y=log, marks=[(2.0, "knee")])
        assert "nan" not in svg
        assert "inf" not in svg
        assert "b &amp; c" in svg
        assert svg.count("<circle") == (1 if log else 2)
        ys = [float(y) for y in re.findall(r'cy="([\d.]+)"', svg)]
        assert all(TOP <= y <= HEIGHT - BOTTOM for y in ys)
        assert len(svg) < 100_000


def test_nothing_good_ends_it_too() -> None:
    asked: list[float] = []
    points = sweep(curve(lambda r: 0.0, asked), 1.0)
    assert len(asked) <= 6
    assert knee(points)["goodput_per_s"] == 0.0


def test_several_runs_of_a_load_are_drawn_as_whiskers() -> None:
    records = [RequestRecord(i, 0.1 * i, 0.1 * i, i + 1.0, 5, 3, i + 0.5, (0.2, 0.3)) for i in range(4)]
    summary = summarize(records)
    runs = [summary | {"goodput_per_s": goodput} for goodput in (0.5, 1.0, 4.0)]
    points = [summary | {"offered_per_s": rate, "goodput_per_s": 1.0, "runs": runs} for rate in (1.0, 2.0)]
    goodput, *_ = sweep_charts(points, 1.0)
    ends = re.findall(r'd="M[\d.]+ ([\d.]+)V([\d.]+)m-4 0h8M', goodput)
    assert len(ends) == 4, "two lines of two loads"
    up = Axis.over([0.0, 4.0], HEIGHT - BOTTOM, TOP, log=False, from_zero=True)
    assert ends[0] == (f"{up.at(0.5):.1f}", f"{up.at(4.0):.1f}")
    plain = [{key: value for key, value in point.items() if key != "runs"} for point in points]
    assert "m-4 0h8" not in "".join(sweep_charts(plain, 1.0))

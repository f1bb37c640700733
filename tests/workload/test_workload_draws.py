"""Arrivals, lengths, synthetic workloads and prompts: their distributions, and that a seed says everything."""

from __future__ import annotations

import math
import statistics
from random import Random

import pytest

from quire.errors import ConfigError
from quire.slo import Slo
from quire_lab.workload.build import Synthetic, with_cancellations
from quire_lab.workload.distributions import (
    Arrivals,
    Fixed,
    LogNormal,
    Uniform,
    mean_rate,
    parse_lengths,
    replay,
)
from quire_lab.workload.request import PromptMaker, WorkloadRequest

NUM = 20_000


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_variance_of_their_gamma(burstiness: float) -> None:
    times = Arrivals(rate=5.0, burstiness=burstiness).times(NUM, seed=1)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert min(gaps) >= 0.0
    assert statistics.fmean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.variance(gaps) == pytest.approx(0.04 / burstiness, rel=0.1)


def test_a_ramp_doubles_its_rate_where_it_should() -> None:
    arrivals = Arrivals(rate=2.0, ramp_to=6.0)
    times = arrivals.times(NUM, seed=2)
    length_s = 2 * NUM / 8.0
    # By the middle of a ramp from 2 to 6 per second, 2 t + t²·(4/length)/2 = 3/8 of all have come.
    assert sum(t <= length_s / 2 for t in times) / NUM == pytest.approx(3 / 8, abs=0.02)
    assert times == sorted(times)
    steady = Arrivals(rate=3.0, ramp_to=3.0).times(100, seed=3)
    assert steady == pytest.approx(Arrivals(rate=3.0).times(100, seed=3), rel=1e-9)


def test_all_at_once_constant_and_replay() -> None:
    assert Arrivals().times(3, 0) == [0.0] * 3
    assert Arrivals(rate=4.0, burstiness=math.inf).times(3, 0) == [0.0, 0.25, 0.5]
    assert replay([7.0, 8.0, 10.0], 0.5) == [0.0, 0.5, 1.5]
    assert mean_rate([0.0, 1.0, 4.0]) == 0.5


def test_one_seed_one_workload() -> None:
    spec = Synthetic(50, Uniform(3, 9), LogNormal(20, 0.5, 40), Arrivals(rate=3.0), num_turns=3, think_s=2.0)
    assert spec.build(7) == spec.build(7)
    assert spec.build(7) != spec.build(8)
    assert with_cancellations(spec.build(7), 0.5, 1) == with_cancellations(spec.build(7), 0.5, 1)


@pytest.mark.parametrize(
    "build",
    [
        lambda: Arrivals(rate=0.0),
        lambda: Arrivals(rate=math.nan),
        lambda: Arrivals(rate=1.0, burstiness=-1.0),
        lambda: Arrivals(ramp_to=1.0),
        lambda: Arrivals(rate=1.0, ramp_to=2.0, burstiness=2.0),
        lambda: replay([0.0], -1.0),
        lambda: Synthetic(0),
        lambda: Synthetic(1, think_s=math.inf),
        lambda: Synthetic(1, Fixed(9)).build(0, max_model_len=8),
        lambda: with_cancellations(Synthetic(1).build(0), 1.5, 0),
        lambda: PromptMaker(5, first_id=5),
    ],
)
def test_what_cannot_be_is_refused(build: object) -> None:
    with pytest.raises(ConfigError):
        build()  # type: ignore[operator]


def test_lengths() -> None:
    rng = Random(4)
    assert parse_lengths("512", "x") == Fixed(512)
    assert parse_lengths("uniform:2,4", "x") == Uniform(2, 4)
    assert parse_lengths("lognormal:512,0.8,4096", "x") == LogNormal(512, 0.8, 4096)
    assert set(Uniform(2, 4).draw(200, rng)) == {2, 3, 4}
    drawn = LogNormal(100, 1.0, 1000).draw(NUM, rng)
    assert statistics.median(drawn) == pytest.approx(100, rel=0.05)
    assert max(drawn) == 1000
    assert min(LogNormal(1, 3.0).draw(500, rng)) == 1
    for spec in (Fixed(3), Uniform(1, 9), LogNormal(7, 0.5), LogNormal(7, 0.5, 9)):
        assert parse_lengths(str(spec), "x") == spec
    for bad in (
        "",
        "0",
        "1.5",
        "uniform:4,2",
        "uniform:1",
        "lognormal:0,1",
        "gauss:1,2",
        "lognormal:1,1,nan",
    ):
        with pytest.raises(ConfigError, match="--input-len"):
            parse_lengths(bad, "--input-len")


def test_turns_grow_and_stop_at_the_context() -> None:
    workload = Synthetic(6, Fixed(10), Fixed(5), num_turns=3, prefix_length=4).build(0, max_model_len=35)
    sessions: dict[str | None, list[int]] = {}
    for request in workload.requests:
        sessions.setdefault(request.session, []).append(request.num_prompt_tokens)
    assert list(sessions.values()) == [[14, 29]] * 2
    assert workload.refused == {"longer than the context": 2}


def test_cancellations_hit_their_share_within_the_answer() -> None:
    workload = with_cancellations(Synthetic(NUM // 10, output_lengths=Fixed(8)).build(0), 0.25, 5)
    after = [r.cancel_after_tokens for r in workload.requests if r.cancel_after_tokens is not None]
    assert len(after) / len(workload.requests) == pytest.approx(0.25, abs=0.03)
    assert set(after) == set(range(1, 9))


def prompt(index: int, length: int, hashes: tuple[int | str, ...] = (), **fields: object) -> WorkloadRequest:
    return WorkloadRequest(0.0, length, 1, index, hashes, 8 if hashes else 0, **fields)  # type: ignore[arg-type]


def test_equal_hashes_are_equal_tokens_and_nothing_else_is() -> None:
    maker = PromptMaker(1000, seed=3, first_id=100)
    a, b = maker.token_ids(prompt(0, 20, (1, 2))), maker.token_ids(prompt(1, 21, (1, 3)))
    assert (len(a), len(b)) == (20, 21)
    assert a[:8] == b[:8]
    assert a[8:16] != b[8:16]
    assert a[16:] != b[16:20]
    assert all(100 <= i < 1000 for i in a + b)
    assert maker.token_ids(prompt(2, 5, (1, 2))) == a[:5]  # the last block is cut by the prompt's end
    assert maker.token_ids(prompt(0, 20, ("1", "2")))[:8] != a[:8]
    assert PromptMaker(1000, seed=4).token_ids(prompt(0, 20, (1, 2))) != a


def test_a_later_turn_begins_with_the_turn_before() -> None:
    maker = PromptMaker(500)
    first = maker.token_ids(prompt(0, 11, session="s"))
    second = maker.token_ids(prompt(9, 30, session="s", turn=1))
    assert second[:11] == first
    assert (
        maker.text(prompt(9, 30, session="s"), start=11).split()
        == maker.text(prompt(9, 30, session="s")).split()[11:]
    )


def test_tokens_never_change() -> None:
    """Recorded: a workload must be the same on every machine and with every version of numpy."""
    assert PromptMaker(32000, seed=1).token_ids(prompt(0, 4, (7,))) == [2312, 2445, 4193, 2138]
    assert PromptMaker(10, seed=1).text(prompt(3, 4)) == "down picture had also"


def test_slo() -> None:
    slo = Slo.parse("ttft=500ms, tpot=0.05s")
    assert slo == Slo(0.5, 0.05)
    assert str(slo) == "ttft=500ms,tpot=50ms"
    assert Slo.parse(str(slo)) == slo
    assert slo.met(0.5, 0.05, 99.0)
    assert slo.met(0.5, None, 99.0)
    assert not slo.met(0.51, 0.01, 1.0)
    assert not slo.met(None, 0.01, 1.0)
    assert not Slo.parse("e2el=1s").met(0.1, 0.1, 1.1)
    for bad in ("", "ttft", "ttft=5", "ttft=0ms", "ttfs=5ms", "ttft=1s,ttft=2s", "ttft=-1ms", "tpot=nan ms"):
        with pytest.raises(ConfigError, match="slo"):
            Slo.parse(bad)

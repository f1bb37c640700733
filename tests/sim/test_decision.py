"""`quire simulate --versus`: a decision over draws, where the figures themselves scatter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.sim.test_simulate import MADE, WORK, quire

from quire.cost.profile import Spread
from quire.errors import ConfigError
from quire_lab.bench.args import ServeBenchArgs, SimulateArgs
from quire_lab.sim.decision import Decision, Side, decide


@pytest.fixture
def shared_host(tmp_path: Path) -> Path:
    """Two states that differ 2.8 times, as profiles of a shared host did."""
    replace(MADE, spread=Spread.of([(0.6, 1.0, 1.68)])).save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def test_settings_that_differ_less_than_the_machine_scatters_are_told_apart(shared_host: Path) -> None:
    said = " ".join(
        quire("--profile", str(shared_host), *WORK, "--versus", "max-num-seqs=1", "--draws", "5").split()
    )
    assert "fast … slow state of the machine" in said, "the range of the run itself"
    assert "as given before max-num-seqs=1 in 5 of 5 draws: e2el_ms.mean" in said
    side = Side("as given", SimulateArgs(profile=str(shared_host)),
                ServeBenchArgs(rate=20.0, limit=30, input_len="100", output_len="10"), {})  # fmt: skip
    decision = decide(side, "max_num_seqs=1", 5)
    first, second = zip(*decision.values, strict=True)
    assert max(first) > min(second), "the ranges overlap"
    assert decision.wins == (5, 0)
    assert decide(side, "max_num_seqs=1", 5) == decision, "the same draws"


def test_equal_settings_are_level(shared_host: Path) -> None:
    side = Side("as given", SimulateArgs(profile=str(shared_host)),
                ServeBenchArgs(rate=20.0, limit=10, input_len="50", output_len="5"), {})  # fmt: skip
    assert "are level in 3 draws (0 each, equal in 3)" in str(decide(side, 'gate="continuous"', 3))


def test_goodput_decides_where_there_is_an_slo() -> None:
    side = Side("as given", SimulateArgs(hardware="h100", model="llama-3.1-8b"),
                ServeBenchArgs(rate=8.0, limit=12, input_len="500", output_len="20", slo="ttft=1s"),
                {"max_model_len": 1024})  # fmt: skip
    decision = decide(side, "weights=fp8", 3)
    assert decision.figure == "goodput_per_s"
    assert len({a for a, _ in decision.values}) > 1, "each draw has another engine's constants"


def test_wins_are_counted_beyond_one_percent() -> None:
    one = Decision(("A", "B"), "goodput_per_s", True, ((10.0, 8.0), (5.0, 6.0), (7.0, 7.01), (9.0, 4.0)))
    assert one.wins == (2, 1)
    assert str(one).startswith("A before B in 2 of 4 draws, equal in 1: goodput_per_s 5 … 10 against 4 … 8")
    assert replace(one, higher=False).wins == (1, 2)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("max_num_seq=8", "max_num_seqs"),
        ("gate", "SETTING=VALUE"),
        ("replicas=0", "replicas"),
        ("replicas=two", "replicas"),
    ],
)
def test_a_wrong_comparison_is_named(shared_host: Path, text: str, match: str) -> None:
    side = Side("as given", SimulateArgs(profile=str(shared_host)), ServeBenchArgs(), {})
    with pytest.raises(ConfigError, match=match):
        decide(side, text, 2)

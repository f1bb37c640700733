"""Every simulation draws with its defaults and at the ends of each control, in the terminal and as JSON."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from quire.cli import app
from quire.errors import ConfigError
from quire_lab.learn.draw import draw
from quire_lab.learn.picture import Picture
from quire_lab.learn.registry import SIMULATIONS
from quire_lab.learn.simulation import Control, Simulation

pytestmark = pytest.mark.component


def drawn(picture: Picture) -> str:
    """Return the picture as a terminal shows it; it must be JSON as well."""
    json.dumps(picture.as_dict(), allow_nan=False)
    out = Console(file=io.StringIO(), width=120)
    draw(out, picture)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def ends(control: Control) -> list[Any]:
    if control.kind == "choice":
        return [c for c in control.choices if c != control.default]
    return [] if control.kind == "text" else [control.low, control.high]


# At the high end each of these takes seconds.
HEAVY = {"prefix-cache", "production-server", "throughput-latency", "paged-attention", "disaggregation",
         "latency-metrics"}  # fmt: skip
DRAWN = [
    pytest.param(one, end, id=f"{name}-{end}", marks=[pytest.mark.slow] * (end == "high" and name in HEAVY))
    for name, one in SIMULATIONS.items()
    for end in ("default", "low", "high")
]


@pytest.mark.parametrize(("simulation", "end"), DRAWN)
def test_it_draws(simulation: Simulation, end: str) -> None:
    """With the defaults, and with all numbers at one end."""
    numbers = [c for c in simulation.controls if c.kind in ("int", "float")]
    assert drawn(simulation.run(**({c.name: getattr(c, end) for c in numbers} if end != "default" else {})))


@pytest.mark.slow
@pytest.mark.parametrize("simulation", SIMULATIONS.values(), ids=SIMULATIONS)
def test_it_draws_at_the_ends_of_each_control(simulation: Simulation) -> None:
    first = simulation.run()
    assert simulation.run() == first, "the same controls give the same picture"
    assert drawn(first)
    for control in simulation.controls:
        for value in ends(control):
            assert drawn(simulation.run(**{control.name: value}))


@pytest.mark.parametrize("simulation", SIMULATIONS.values(), ids=SIMULATIONS)
def test_a_wrong_value_is_an_error_with_its_range(simulation: Simulation) -> None:
    for control in simulation.controls:
        if control.kind != "text":
            with pytest.raises(ConfigError, match=control.flag):
                simulation.run(**{control.name: "nonsense"})
    with pytest.raises(ConfigError, match="no control"):
        simulation.run(nonsense=1)


def test_the_command_lists_draws_and_prints_json() -> None:
    listed = CliRunner().invoke(app, ["learn"]).output
    assert all(name in listed for name in SIMULATIONS)
    said = CliRunner().invoke(app, ["learn", "kv-growth", "--json", "--context", "8192", "--users=2"]).output
    parts = json.loads(said)["parts"]
    assert parts[0]["lines"][0]["x"][-1] == 8192
    assert CliRunner().invoke(app, ["learn", "kv-growth", "--context"]).exception is not None


def test_static_batch_of_four_lengths_is_44_percent_idle() -> None:
    picture = SIMULATIONS["batching"].run(lengths="20,28,14,50", every_ms=0)
    assert picture.fact("static batching") == pytest.approx(44.0)

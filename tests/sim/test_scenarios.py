"""Each experiment's answer holds of its own runs; a person's own file; what is wrong in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.errors import ConfigError
from quire_lab.sim.scenario import (
    SCENARIOS,
    Scenario,
    Summary,
    figures_of,
    load_scenario,
    run_one,
    scenario_answer,
)

pytestmark = pytest.mark.component

LONG = {"parallel", "speculation", "scale-out", "autoscale", "breaking-point"}  # each takes more than 4 s


def needed(scenario: Scenario) -> list[tuple[str, Any]]:
    """Return the runs that the figures are made of."""
    found: dict[tuple[str, Any], None] = {}
    for spec in scenario.figures.values():
        of, at = spec.get("of", spec.get("best_of")), spec.get("at", scenario.values[0])
        for x in scenario.values if "best_of" in spec else (at,):
            found[of, x] = None
        if "over" in spec or "over_at" in spec:
            found[spec.get("over", of), spec.get("over_at", at)] = None
    return list(found)


def run_all(scenario: Scenario, runs: list[tuple[str, Any]]) -> dict[tuple[str, Any], Summary]:
    variants = {variant["name"]: variant for variant in scenario.variants}
    return {(name, x): run_one(scenario, variants[name], x, {}) for name, x in runs}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in SCENARIOS]
)
def test_the_answer_holds_of_the_runs(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.figures
    assert scenario.claims
    results = run_all(scenario, needed(scenario))
    answer, false = scenario_answer(scenario, results)
    assert not false
    assert "nan" not in answer


@pytest.mark.parametrize("name", SCENARIOS)
def test_figures_name_variants_and_values_that_exist(name: str) -> None:
    scenario = load_scenario(name)
    variants = {variant["name"] for variant in scenario.variants}
    assert all(variant in variants and x in scenario.values for variant, x in needed(scenario))
    assert all(claim.split()[0] in scenario.figures for claim in scenario.claims)


def test_the_405b_wall_stands() -> None:
    scenario = load_scenario("model-size-wall")
    results = run_all(scenario, [("8 × H100, bf16", "llama-3.1-405b")])
    assert "does not fit" in results["8 × H100, bf16", "llama-3.1-405b"]["error"]
    assert figures_of(scenario, results)["two"] != figures_of(scenario, results)["two"], "not run: NaN"


OWN = """
title = "Mine"
question = "Twice the load?"
answer = "{more:.2f} times the tokens/s."
x = "rate"
values = [1.0, 2.0]
claims = ["more >= 1000"]
[figures]
more = { of = "plain", at = 2.0, key = "output_tokens_per_s", over_at = 1.0 }
[base]
hardware = "h100"
model = "llama-3.1-8b"
input_len = "100"
output_len = "20"
limit = 10
[[variants]]
name = "plain"
"""


def test_a_file_of_ones_own_runs_and_says_what_does_not_hold(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    out = tmp_path / "mine.json"
    done = CliRunner().invoke(app, ["simulate", "--scenario", str(path), "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "Not so in these runs: more >= 1000" in " ".join(done.output.split())
    said = json.loads(out.read_text())
    assert said["scenario"] == "mine"
    runs = {run["rate"]: run["output_tokens_per_s"] for run in said["runs"]}
    assert said["figures"]["more"] == pytest.approx(runs[2.0] / runs[1.0])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("not toml", "cannot be read"),
        (OWN.replace("question", "qestion"), "unknown key 'qestion'"),
        (OWN.replace("values = [1.0, 2.0]", ""), "values is missing"),
        (OWN.replace('name = "plain"', "rate = 3.0"), "every variant"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_the_place(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=named):
        load_scenario(str(path))

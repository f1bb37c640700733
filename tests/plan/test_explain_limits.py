"""What limits a plan, and what it costs: each line's figure from its formula."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.cli.flags import PlanArgs
from quire.cost.cost_model import CostModel
from quire.cost.hardware import hardware_table
from quire.cost.links import LINK_OPS, LinkCost
from quire.cost.profile import Profile
from quire.cost.split import Split, shard_of
from quire.errors import ConfigError
from quire.models.checkpoint import spec_of
from quire.parallel.shard import shard
from quire.parallel.topology import Topology
from quire.parallel.traffic import step_bytes, uses
from quire_lab.cli.plan import question_of
from quire_lab.plan.capacity import plan_capacity
from quire_lab.plan.explain import explain
from quire_lab.plan.explain_line import Line
from quire_lab.plan.laws import imbalance, owned_per_hour


def lines(
    model: str = "llama-3.1-70b", api: float | None = None, **more: object
) -> dict[str, tuple[str, str]]:
    plan = plan_capacity(question_of(PlanArgs(model, "h100", **more)))  # type: ignore[arg-type]
    return {line.name: (line.value, line.formula) for line in explain(plan, api)}


def number(text: str) -> float:
    found = re.search(r"[\d,]+\.?\d*", text)
    assert found is not None
    return float(found[0].replace(",", ""))


def test_the_roofline_lines() -> None:
    said = lines(count=4, split="TP4", concurrency=32)
    assert said["ridge point"][0] == "295 op/B"  # 989e12 / 3,350e9
    small, large = (number(said[f"intensity, batch {b}"][0]) for b in (1, 256))
    assert small == pytest.approx(1.0, abs=0.1)  # two operations a weight of two bytes
    assert small < number(said["intensity, batch 32"][0]) < large < 295
    assert "bound by memory" in said["intensity, batch 256"][1]
    assert "bound by compute" in said["intensity, prompt of 1,024"][1]
    assert number(said["step at the roofline"][0]) > 10.5  # 141 GB over 4 · 3,350 GB/s


def test_the_links_carry_what_a_ring_moves() -> None:
    said = lines(count=4, split="TP4", concurrency=32)
    each = 2 * 3 / 4 * 32 * 8192 * 2  # of 32 rows of 8,192 bf16
    logits = 3 * 32 * 128_256 // 4 * 4
    value, text = said["tp link, batch 32"]
    assert number(value) == pytest.approx((161 * each + logits) / 1e6, abs=0.01)
    assert "161 all-reduces of 786.4 kB + 1 gather of 12,312.6 kB at 450 GB/s" in text
    assert not any("link" in name for name in lines("llama-3.1-8b"))


@pytest.mark.parametrize(
    ("model", "split", "topology"),
    [
        ("llama-3.2-1b", "TP2", Topology(ep=2)),
        ("mixtral-8x7b", "TP2", Topology(tp=2)),
        ("qwen3-30b-a3b", "TP2,EP2", Topology(ep=2)),
        ("llama-3.2-1b", "CP2,PP2", Topology(cp=2, pp=2)),
    ],
)
def test_the_links_of_cpus_carry_what_ranks_count(model: str, split: str, topology: Topology) -> None:
    asked = PlanArgs(model, "epyc-9654", count=topology.world_size, split=split, concurrency=8)
    said = {line.name: line.value for line in explain(plan_capacity(question_of(asked)))}
    stages = range(0, topology.world_size, topology.world_size // topology.pp)
    rows = 8 // topology.pp
    expected = sum(
        step_bytes(uses(shard(spec_of(model), topology, n), "bfloat16"), rows, rows) for n in stages
    )
    links = [number(value) for name, value in said.items() if "link" in name]
    assert sum(links) == pytest.approx(expected / 1e6, abs=0.02)


@pytest.mark.parametrize(
    ("model", "topology"), [("llama-3.2-1b", Topology(ep=2)), ("mixtral-8x7b", Topology(tp=2))]
)
def test_ranks_on_several_machines_exchange_over_gloo(model: str, topology: Topology, tmp_path: Path) -> None:
    """Each sends its rows over the network; the measured cost of a message comes on top."""
    asked = PlanArgs(model, "epyc-9654", count=2, nodes=2, split="TP2", concurrency=8)
    said = {line.name: line for line in explain(plan_capacity(question_of(asked)))}["tp link, batch 8"]
    found = uses(shard(spec_of(model), topology, 0), "bfloat16")
    sent = step_bytes(found, 8, 8, "gloo")
    assert number(said.value) == pytest.approx(sent / 1e6, abs=0.02)
    assert "over the network" in said.formula
    links = {op: LinkCost(5e-3, 0.0) for op in LINK_OPS}
    Profile("quill", {}, {}, CostModel(0.001), links=links).save(tmp_path / "made.json")
    measured = replace(asked, profile=str(tmp_path / "made.json"))
    said = {line.name: line for line in explain(plan_capacity(question_of(measured)))}["tp link, batch 8"]
    assert f"in {1e3 * (5e-3 * sum(use.count for use in found) + sent / 1.25e9):,.0f} ms" in said.formula
    near = question_of(replace(asked, nodes=1))  # one machine: shared memory, as without --nodes
    assert [each.transport for each in near.steps(Split(tp=2)).link_uses(8, 8)] == ["shared"] * len(found)


def test_measured_links_replace_those_of_the_table(tmp_path: Path) -> None:
    links = {op: LinkCost(1e-3, 0.0) for op in LINK_OPS}
    profile = Profile("quill", {}, {}, CostModel(0.001), links=links)
    profile.save(tmp_path / "made.json")
    asked = PlanArgs("llama-3.2-1b", "epyc-9654", count=2, split="TP2", profile=str(tmp_path / "made.json"))
    said = {line.name: line.formula for line in explain(plan_capacity(question_of(asked)))}
    assert "as measured in 66 ms" in said["tp link, batch 1"]
    plain = explain(plan_capacity(question_of(replace(asked, profile=None))))
    assert "at 16 GB/s" in {line.name: line.formula for line in plain}["tp link, batch 1"]
    with pytest.raises(ConfigError, match="links between CPU ranks, and h100 is no CPU"):
        question_of(replace(asked, gpu="h100"))
    replace(profile, links=None).save(tmp_path / "made.json")
    with pytest.raises(ConfigError, match="quire profile --parallel"):
        question_of(asked)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_planners_weights_are_those_that_a_rank_holds(tp: int) -> None:
    spec = spec_of("llama-3.1-8b")
    ranks = [shard(spec, Topology(tp=tp), rank).weight_bytes("bfloat16") for rank in range(tp)]
    assert shard_of(spec, "bf16", Split(tp=tp)).weight_bytes == pytest.approx(max(ranks), rel=1e-3)


def test_a_pipeline_waits_and_words_follow_from_tokens() -> None:
    said = lines(count=8, split="TP4,PP2", workload="16384/100", concurrency=1)
    assert said["pipeline bubble"] == (
        "33%",
        "(2 − 1) / (2 chunks + 2 − 1) of a prompt alone; of decodes 50%",
    )
    tokens = number(said["words"][1].split("·")[1])
    assert number(said["words"][0]) == pytest.approx(0.75 * tokens, abs=0.06)
    assert "pipeline bubble" not in lines(count=4)


@pytest.mark.parametrize(("choices", "bins"), [(48, 4), (1000, 8), (64, 64), (2000, 256)])
def test_imbalance_is_that_of_random_routing(choices: int, bins: int) -> None:
    rng, total, rounds = random.Random(0), 0, 400
    for _ in range(rounds):
        loads = [0] * bins
        for _ in range(choices):
            loads[rng.randrange(bins)] += 1
        total += max(loads)
    assert imbalance(choices, bins) == pytest.approx(total / rounds / (choices / bins), rel=0.04)
    assert imbalance(choices, 1) == 1.0


def test_experts_of_a_plan_are_unbalanced() -> None:
    value, text = lines("mixtral-8x7b", count=4, split="TP4,EP4", concurrency=64)["expert imbalance"]
    assert value == f"{imbalance(128, 4):.2f} ×"
    assert text.startswith("fullest rank of 4 over the mean: 64 rows · 2 experts")


def test_energy_and_owned_devices() -> None:
    said = lines(count=4, split="TP4", rate=5.0)
    assert number(said["energy of a token out"][0]) == pytest.approx(4 * 700 / (5 * 256), abs=0.01)
    assert said["own devices"][0] == f"${owned_per_hour(120_000, 2800, 0.12):.2f}/h"
    days = 120_000 / (4 * 2.69 - 2.8 * 0.12) / 24
    assert f"after {days:,.0f} days" in said["own devices"][1]
    assert said["spot"][0] == "$3.24/h"
    own = lines(count=4, split="TP4", rate=5.0, watts=350.0, purchase=10_000.0, price=9.0)
    assert number(own["energy of a token out"][0]) == pytest.approx(4 * 350 / (5 * 256), abs=0.01)
    assert own["own devices"][0] == f"${owned_per_hour(40_000, 1400, 0.12):.2f}/h"
    assert "spot" not in own  # which the table gives for its own rent


def test_an_api_is_dearer_from_so_many_tokens_on() -> None:
    said = lines(count=4, split="TP4", rate=5.0, api=2.0)["API break-even"]
    assert number(said[0]) == pytest.approx(4 * 2.69 * 24 / 2.0, abs=0.1)  # million tokens
    assert lines(count=4, split="TP4", rate=5.0, api=0.0001)["API break-even"][0] == "never"
    assert lines(count=4, split="TP4", rate=5.0)["API break-even"][0].startswith("$")


def test_the_table_of_devices_has_what_they_cost() -> None:
    table = hardware_table()
    assert table["h100"].watts == 700
    for hw in table.values():
        if hw.spot_usd is not None:
            assert hw.price is not None
            assert hw.spot_usd < hw.price.usd
    shown = CliRunner().invoke(app, ["plan", "quill", "--gpu", "list"]).output
    assert re.search(
        r"^h100 +80 +3,350 +989.0 +700 +30,000 +2.69 +0.81 +RunPod, 2026-03", shown, re.MULTILINE
    )
    listed = json.loads(CliRunner().invoke(app, ["plan", "quill", "--gpu", "list", "--json"]).output)
    assert set(listed) == set(table)


def test_people_are_a_cost_of_own_devices_and_not_of_an_api() -> None:
    plan = plan_capacity(question_of(PlanArgs("llama-3.1-8b", "h100", rate=2.0)))

    def line(people: float, api: float | None = None) -> Line:
        return next(x for x in explain(plan, api, 0.12, people) if x.name == "API break-even")

    rent = 24 * plan.question.hardware.price.usd  # type: ignore[union-attr]
    alone, staffed = line(0.0, 0.3), line(7300.0, 0.3)  # 10 USD an hour
    assert alone.value == f"{rent / 0.3:,.1f} million tokens a day"
    assert staffed.value == f"{(rent + 240) / 0.3:,.1f} million tokens a day"
    assert "rent + $10.00 people)/h" in staffed.formula
    assert float(line(7300.0).value[1:]) > float(line(0.0).value[1:])


@pytest.mark.parametrize("name", ["rtx-6000-ada", "inferentia2"])
def test_devices_that_texts_name_can_be_planned(name: str) -> None:
    assert plan_capacity(question_of(PlanArgs("llama-3.1-8b", name))).advice.chosen is not None

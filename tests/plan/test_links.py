"""Costs of links: their fit, their file, and the step times of ranks that pay them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.cost.cost_model import CostModel, Curve, StepFeatures
from quire.cost.links import LINK_OPS, LinkCost, RankedSteps, links_from_json, links_to_json
from quire.cost.profile import HostCost, Profile, load_profile
from quire.errors import ConfigError
from quire.models.checkpoint import spec_of
from quire.parallel.topology import Topology
from quire_lab.bench.args import ServeBenchArgs, SimulateArgs
from quire_lab.bench.profile_links import measure_links
from quire_lab.bench.profile_serving import OUTPUT, PROMPT, _beyond
from quire_lab.sim.setup import set_up

WHOLE = CostModel(0.008, Curve((1.0, 64.0), (0.0, 0.002)), Curve((0.0, 1.0), (0.0, 0.001)), per_pair_s=1e-9)
LINKS = {op: LinkCost(1e-4, 1e-9) for op in LINK_OPS}
FREE = {op: LinkCost(0.0, 0.0) for op in LINK_OPS}
DECODES = StepFeatures(8, 8, 8, 800, 0, 0)
MADE = Profile(
    "quill",
    {"name": "a machine"},
    {
        "dtype": "bfloat16", "kv_dtype": "bfloat16", "quantize": None, "threads": 2, "cpu_isa": "amx", "block_size": 16,
        "num_kv_blocks": 512, "kv_block_bytes": 16384, "windows": [None], "max_model_len": 2048, "max_num_seqs": 64,
        "max_num_batched_tokens": 256, "max_in_flight": 1,
    },
    WHOLE,
    HostCost(0.0005),
    links=LINKS,
)  # fmt: skip


def ranked(topology: Topology, links: dict[str, LinkCost] = FREE) -> RankedSteps:
    return RankedSteps(WHOLE, spec_of("quill"), topology, links, "bfloat16", host_s=0.001)


def test_a_fit_finds_latency_and_bytes_per_second() -> None:
    cost = LinkCost.fit([(size, 2e-5 + size / 4e9) for size in (1e3, 1e4, 1e5, 1e6)])
    assert cost.alpha_s == pytest.approx(2e-5, rel=1e-3)
    assert 1.0 / cost.beta_s == pytest.approx(4e9, rel=1e-3)


def test_two_ranks_halve_a_step_where_links_are_free() -> None:
    one = WHOLE.seconds(DECODES)
    assert ranked(Topology(tp=2)).seconds(DECODES) == pytest.approx(0.001 + one / 2, rel=0.01)
    first, last = ranked(Topology(pp=2)).stage_seconds(DECODES)
    assert first + last == pytest.approx(0.001 + one, rel=0.01)


def test_ranks_pay_a_latency_per_collective_and_its_bytes() -> None:
    layers, rows = spec_of("quill").num_layers, 8
    more = ranked(Topology(tp=2), LINKS).seconds(DECODES) - ranked(Topology(tp=2)).seconds(DECODES)
    hidden, vocab = spec_of("quill").hidden_size, spec_of("quill").vocab_size
    num_bytes = rows * (2 * layers * 3 * hidden + 2 * hidden + 4 * hidden // 4 + 2 * vocab)
    assert more == pytest.approx((2 * layers + 2 + 2) * 1e-4 + num_bytes * 1e-9, rel=0.02)
    sends = ranked(Topology(pp=2), LINKS).seconds(DECODES) - ranked(Topology(pp=2)).seconds(DECODES)
    assert sends == pytest.approx(3 * 1e-4 + rows * hidden * (2 + 4) * 1e-9)


def test_links_that_were_not_measured_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"all_gather, all_reduce.*quire profile --parallel"):
        RankedSteps(WHOLE, spec_of("quill"), Topology(tp=2), {}, "bfloat16")
    with pytest.raises(ConfigError, match="unknown op 'all_to_none'"):
        links_from_json({"all_to_none": {"alpha_s": 0.0, "beta_s": 0.0}})


def test_the_links_of_this_machine_are_measured_and_saved(tmp_path: Path) -> None:
    found = measure_links()
    assert set(found) == set(LINK_OPS)
    assert all(cost.alpha_s + cost.beta_s > 0.0 and len(cost.points) == 5 for cost in found.values())
    assert links_from_json(json.loads(json.dumps(links_to_json(found)))) == found
    replace(MADE, links=found).save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json").links == found


def test_the_host_of_ranks_is_saved_and_simulated(tmp_path: Path) -> None:
    hosts = {"ranks": HostCost(0.002, request_s=0.003), "stages": HostCost(0.001)}
    made = replace(MADE, ranked=hosts)
    made.save(tmp_path / "profile.json")
    loaded = load_profile(tmp_path / "profile.json")
    assert loaded.ranked == hosts
    assert loaded.host_of(Topology()) == MADE.host
    assert loaded.host_of(Topology(ep=2)) == hosts["ranks"]
    assert loaded.host_of(Topology(tp=2, pp=2)) == hosts["stages"]
    assert MADE.host_of(Topology(tp=2)) == MADE.host


@pytest.mark.parametrize("num", [1, 2, 32])
@pytest.mark.parametrize(
    "topology", [Topology(), Topology(tp=2), Topology(pp=2)], ids=["one", "ranks", "stages"]
)
def test_the_host_of_ranks_is_what_the_model_lacks(topology: Topology, num: int) -> None:
    """Gaps of steps with a known host's part give that part."""
    model = ranked(topology)
    each = -(-num // topology.pp)
    decodes = StepFeatures(each, each, each, each * (PROMPT + OUTPUT // 2), 0, 0)
    stages = model.stage_seconds(decodes)
    gap_s = sum(stages) + 0.01 if num == 1 else topology.pp * (max(stages) + 0.01)
    found, beyond_s, whole_s = _beyond(model, num, gap_s)
    assert found == each
    assert beyond_s == pytest.approx(0.01)
    assert whole_s == pytest.approx(gap_s / min(num, topology.pp))


@pytest.mark.parametrize(
    ("flag", "steps_out"), [("--tensor-parallel-size", 1), ("--pipeline-parallel-size", 2)]
)
def test_a_profile_with_links_simulates_ranks(flag: str, steps_out: int, tmp_path: Path) -> None:
    path, out = tmp_path / "profile.json", tmp_path / "out.json"
    MADE.save(path)
    work = ["--limit", "20", "--rate", "40", "--input-len", "100", "--output-len", "20"]
    done = CliRunner().invoke(app, ["simulate", "--profile", str(path), *work, flag, "2", "--json", str(out)])
    assert done.exit_code == 0, done.output
    bubbles = json.loads(out.read_text())["simulation"]["bubbles"]
    assert ("bubbles" in done.output) == (steps_out > 1)
    assert 0.0 < bubbles < 0.6 if steps_out > 1 else bubbles == 0.0


def test_the_layout_of_simulated_ranks_can_be_chosen(tmp_path: Path) -> None:
    """As `quire serve` takes it: rows of a dense model by default, partial sums if asked for."""
    MADE.save(tmp_path / "made.json")
    profile, flags = str(tmp_path / "made.json"), ServeBenchArgs()
    ranks, times = {}, {}
    for layout in ("auto", "rows", "sums"):
        args = SimulateArgs(profile=profile, tensor_parallel_size=2, tensor_parallel_layout=layout)  # type: ignore[arg-type]
        setup = set_up(args, flags, {})
        ranks[layout], times[layout] = setup.facts["ranks"], setup.step_time.seconds(DECODES)
    assert times["auto"] == times["rows"] != times["sums"]
    assert times["sums"] == pytest.approx(
        RankedSteps(
            WHOLE, spec_of("quill"), Topology(tp=2), LINKS, "bfloat16", host_s=MADE.host.fixed_s
        ).seconds(DECODES)
    )
    wrong = SimulateArgs(
        hardware="epyc-9654", model="qwen3-30b-a3b", tensor_parallel_size=2, enable_expert_parallel=True,
        tensor_parallel_layout="sums",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="enable_expert_parallel cuts matrices by rows"):
        set_up(wrong, flags, {})

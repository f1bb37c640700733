"""`quire simulate` as a person runs it: profiles, settings, sweeps, scenarios, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.families.published import PUBLISHED
from typer.testing import CliRunner

from quire.cli import app
from quire.cost.cost_model import CostModel, Curve
from quire.cost.kept_profiles import profile_path
from quire.cost.profile import HostCost, Profile, Spread
from quire.errors import ConfigError
from quire_lab.bench.args import ServeBenchArgs, SimulateArgs
from quire_lab.bench.runs import make_workload
from quire_lab.bench.summary import summarize
from quire_lab.sim.run import simulate
from quire_lab.sim.scenario import SCENARIOS, load_scenario, run_one, value_of
from quire_lab.sim.setup import set_up

MADE = Profile(
    "quill",
    {"name": "a machine"},
    {
        "dtype": "bfloat16", "kv_dtype": "bfloat16", "quantize": None, "threads": 2, "cpu_isa": "amx", "block_size": 16,
        "num_kv_blocks": 512, "kv_block_bytes": 16384, "windows": [None], "max_model_len": 2048, "max_num_seqs": 64,
        "max_num_batched_tokens": 256, "max_in_flight": 1,
    },
    CostModel(0.004, Curve((1.0, 256.0), (0.0, 0.020)), per_decode_kv_s=1e-7),
    HostCost(0.0005, 2e-5, 0.002, 1e-6),
)  # fmt: skip
SRC = Path(__file__).resolve().parents[2] / "src"
WORK = ("--limit", "30", "--rate", "20", "--input-len", "uniform:20,200", "--output-len", "uniform:2,20")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    MADE.save(tmp_path / "profile.json")
    return tmp_path / "profile.json"


def quire(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["simulate", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_it_writes_what_bench_serve_writes_and_repeats_it(profile: Path, tmp_path: Path) -> None:
    out = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in out:
        said = quire("--profile", str(profile), *WORK, "--slo", "ttft=1s,tpot=50ms", "--json", str(path))
        assert "steps planned by the scheduler" in said
    assert out[0].read_bytes() == out[1].read_bytes()
    summary = json.loads(out[0].read_text())
    assert set(summarize([])) <= set(summary)
    assert summary["num_completed"] == 30
    assert summary["simulation"]["num_steps"] > 30
    assert 0.0 < summary["simulation"]["kv_peak"] < 1.0


@pytest.mark.parametrize(("flag", "threshold"), [(None, 64), (0, 0), (32, 32)])
def test_long_prompts_are_cut_as_at_the_profiled_server(
    flag: int | None, threshold: int, tmp_path: Path
) -> None:
    replace(MADE, settings=MADE.settings | {"long_prefill_token_threshold": 64}).save(tmp_path / "p.json")
    given = {} if flag is None else {"long_prefill_token_threshold": flag}
    setup = set_up(SimulateArgs(profile=str(tmp_path / "p.json")), ServeBenchArgs(), given)
    assert setup.config.scheduler.long_prefill_token_threshold == threshold


def test_step_times_that_profile_kept_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"there are no step times: `quire profile` measures"):
        quire("--workload", "64/16")
    MADE.save(path := profile_path("quill", MADE.machine, MADE.settings))
    quire("--workload", "64/16", "--limit", "5", "--json", str(tmp_path / "r.json"))
    assert json.loads((tmp_path / "r.json").read_text())["run"]["step times"].startswith(str(path))
    with pytest.raises(ConfigError, match="there are no step times of llama"):
        quire("--model", "llama", "--workload", "64/16")


def test_one_record_a_line(profile: Path, tmp_path: Path) -> None:
    quire("--profile", str(profile), *WORK, "--jsonl", str(tmp_path / "r.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(30))
    assert min(line["ttft_ms"] for line in lines) > 6.0  # a step and the way there


def test_a_sweep_finds_a_knee(profile: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    said = quire("--profile", str(profile), *WORK, "--sweep", "--slo", "ttft=200ms", "--json", str(out))
    summary = json.loads(out.read_text())
    assert f"knee at {summary['knee_per_s']:.4g} requests/s" in said
    offered = [point["offered_per_s"] for point in summary["sweep"]]
    assert min(offered) < summary["knee_per_s"] < max(offered)


def test_spread_of_the_profile_becomes_a_range(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    replace(MADE, spread=Spread.of([(1.0, 1.5, 0.8)])).save(path)
    far = "--limit", "30", "--rate", "2", "--input-len", "200", "--output-len", "10", "--slo", "ttft=200ms"
    said = " ".join(quire("--profile", str(path), *far).split())
    assert "fast … slow state of the machine (0.80 … 1.50 of the step times): TTFT p50" in said
    assert "warning" not in said
    near = "--limit", "60", "--rate", "60", "--input-len", "200", "--output-len", "20", "--slo", "ttft=200ms"
    assert "within this spread of the knee" in " ".join(quire("--profile", str(path), *near).split())


def test_scale_out_offers_each_replica_the_same_load() -> None:
    scenario = load_scenario("scale-out")
    assert scenario.scaled == ("rate", "limit")
    small = replace(scenario, base={**scenario.base, "limit": 20})
    for replicas in (1, 3):
        found = run_one(small, scenario.variants[0], replicas, {})
        assert found["num_requests"] == 20 * replicas


def test_the_file_that_serve_reads_is_the_engine_s(profile: Path, tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text(
        'model = "quill"\nport = 9000\n[scheduling]\nmax_num_seqs = 1\ngate = "static"\n[memory]\nkv_memory = "4MB"\n'
    )
    plain, alone = tmp_path / "p.json", tmp_path / "q.json"
    quire("--profile", str(profile), *WORK, "--json", str(plain))
    quire("--profile", str(profile), *WORK, "--json", str(alone), "--config", str(tmp_path / "serve.toml"))
    facts = json.loads(alone.read_text())["run"]["engine"]
    assert facts.startswith("static, fcfs, 1 sequences and 256 tokens a step, 244 blocks")
    slow, fast = (json.loads(path.read_text())["ttft_ms"]["p50"] for path in (alone, plain))
    assert slow > 2 * fast


def test_what_the_profile_says_holds_until_it_is_changed(profile: Path) -> None:
    args = SimulateArgs(profile=str(profile))
    setup = set_up(args, ServeBenchArgs(), {})
    assert setup.step_time == MADE.step_time
    assert (setup.config.cache.num_blocks, setup.config.scheduler.max_num_batched_tokens) == (512, 256)
    assert (setup.config.request_s, setup.config.per_prompt_token_s) == (0.002, 1e-6)
    assert set_up(args, ServeBenchArgs(), {"block_size": 32}).config.cache.num_blocks == 256
    assert set_up(args, ServeBenchArgs(), {"num_kv_blocks": 99}).config.cache.num_blocks == 99


@pytest.mark.parametrize(
    ("args", "settings", "said"),
    [
        ({}, {}, "give either --profile"),
        ({"hardware": "h100"}, {}, "--hardware needs --model"),
        ({"profile": "PROFILE"}, {"dtype": "float32"}, "was measured with 'bfloat16'"),
        ({"profile": "PROFILE", "model": "llama"}, {}, "was measured with 'quill'"),
        ({"profile": "PROFILE"}, {"max_model_len": 9999}, "more than the model's 2048 positions"),
        ({"profile": "PROFILE", "draft_cost": 0.5}, {}, "draft_cost means nothing without --acceptance"),
        ({"profile": "PROFILE", "fault": "kill:at=1,replica=3"}, {}, "replica 3 does not exist"),
        ({"hardware": "h100", "model": "llama-3.1-405b"}, {}, "does not fit"),
    ],
)
def test_what_cannot_be_is_refused(
    profile: Path, args: dict[str, Any], settings: dict[str, Any], said: str
) -> None:
    given = {key: str(profile) if value == "PROFILE" else value for key, value in args.items()}
    with pytest.raises(ConfigError, match=said):
        set_up(SimulateArgs(**given), ServeBenchArgs(), settings)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_runs(name: str) -> None:
    """One variant of each at one value, short; the data of all others is read."""
    scenario = load_scenario(name)
    assert scenario.variants
    assert all(variant["name"] for variant in scenario.variants)
    summary = run_one(scenario, scenario.variants[-1], scenario.values[0], {"limit": 6})
    assert all(value_of(summary, key) is not None for key in scenario.charts)
    scale = scenario.values[0] if "limit" in scenario.scaled else 1
    assert summary["num_completed"] == 6 * scale


def test_the_model_size_wall_is_a_wall() -> None:
    scenario = load_scenario("model-size-wall")
    assert "does not fit" in run_one(scenario, scenario.variants[0], "llama-3.1-70b", {"limit": 2})["error"]


def test_scenarios_are_listed_and_named() -> None:
    said = quire("--scenario", "list")
    assert all(name in said for name in SCENARIOS)
    with pytest.raises(ConfigError, match="did you mean 'scale-out'"):
        load_scenario("scale-aut")


def test_it_runs_without_torch(profile: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        f"sys.argv = ['quire', 'simulate', '--profile', {str(profile)!r}, '--limit', '3']\n"
        "from quire.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SRC)}
    )
    assert done.returncode == 0, done.stderr
    assert "3 of 3 requests completed" in done.stdout


def test_recurrent_states_have_slots(tmp_path: Path) -> None:
    """Of hardware they take their share of the memory; with a profile there are as many as it was measured with."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3.5-9B"][0]))
    args = SimulateArgs(hardware="xeon-8592", model=str(tmp_path))
    flags = ServeBenchArgs(limit=20, rate=5.0, input_len="900", output_len="30")
    setup = set_up(args, flags, {"max_num_seqs": 4})
    cache = setup.config.cache
    assert (cache.num_states, cache.num_checkpoints) == (4, 32)
    with pytest.raises(ConfigError, match=r"max_num_seqs = 60000 .* at most \d+ sequences fit"):
        set_up(args, flags, {"max_num_seqs": 60_000})
    states = {"num_states": 2, "num_checkpoints": 4, "num_draft_states": 0, "state_bytes": 1 << 20}
    replace(MADE, settings={**MADE.settings, **states}).save(tmp_path / "profile.json")
    setup = set_up(SimulateArgs(profile=str(tmp_path / "profile.json")), flags, {})
    assert setup.config.cache.num_checkpoints == 4
    result = simulate(setup.config, setup.step_time, make_workload(flags))
    (report,) = result.replicas
    assert report.stats.num_state_slots == 6
    assert 0 < report.stats.num_checkpoints <= 6
    assert not any(record.error for record in result.records)

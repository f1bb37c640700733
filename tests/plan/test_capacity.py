"""`quire plan`: the tree's turns, the JSON, and the line to run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import roofline_accuracy
from typer.testing import CliRunner

from quire.cli import app
from quire.cli.flags import PlanArgs
from quire.cost.efficiency import MEASURED, efficiency_of
from quire.errors import ConfigError, ModelLoadError
from quire_lab.cli.plan import question_of, serve_command
from quire_lab.plan.by_engine import by_engine, spread
from quire_lab.plan.capacity import CapacityPlan, plan_capacity
from quire_lab.plan.explain import explain

pytestmark = pytest.mark.component


def answer(model: str, gpu: str = "h100", **more: object) -> CapacityPlan:
    return plan_capacity(question_of(PlanArgs(model, gpu, **more)))  # type: ignore[arg-type]


def test_a_small_model_is_replicated() -> None:
    plan = answer("llama-3.1-8b", count=4, rate=10.0)
    assert plan.advice.chosen is not None
    assert (plan.advice.chosen.split.tp, plan.advice.chosen.split.dp) == (1, 4)


def test_a_large_one_is_cut_within_a_domain() -> None:
    plan = answer("meta-llama/Llama-3.1-70B", count=8, rate=10.0, slo="ttft=500ms,tpot=50ms")
    chosen = plan.advice.chosen
    assert chosen is not None
    assert chosen.split.tp * chosen.split.dp == 8
    assert chosen.split.tp >= 2
    assert chosen.holds(plan.question.slo)
    assert plan.knee is not None
    assert plan.knee > 10
    assert plan.devices_needed is not None
    assert plan.devices_needed <= 8
    doubled = answer("meta-llama/Llama-3.1-70B", count=8, rate=40.0, slo="ttft=500ms,tpot=50ms")
    assert doubled.devices_needed is not None
    assert doubled.devices_needed > 8


def test_stages_only_where_no_domain_holds_it() -> None:
    plan = answer("llama-3.1-405b", count=32, concurrency=16)
    assert plan.advice.chosen is not None
    assert plan.advice.chosen.split.pp == 2
    assert answer("llama-3.1-405b", count=1).advice.chosen is None
    assert answer("deepseek-v3", gpu="gb200", count=16, quantize="fp8").advice.chosen is not None


def test_a_context_that_no_split_of_heads_holds_is_striped() -> None:
    """Four KV heads on eight devices: with TP8 each device of a pair has the same K and V."""
    plan = answer("qwen3-30b-a3b", count=8, context=4_000_000)
    chosen = plan.advice.chosen
    assert chosen is not None
    assert (chosen.split.tp, chosen.split.cp, chosen.split.pp) == (4, 2, 1)
    assert chosen.memory.kv_request_share == -(-chosen.memory.kv_bytes_per_request // 8)
    assert any("shared out by position" in reason for reason in plan.advice.reasons)
    whole = plan.question.memory(replace(chosen.split, cp=1))
    assert whole.weights == chosen.memory.weights
    held = answer("qwen3-30b-a3b", count=8, context=400_000).advice.chosen
    assert held is not None
    assert held.split.cp == 1


def test_an_end_to_end_limit_counts() -> None:
    held, missed = (answer("llama-3.1-8b", count=4, rate=2.0, slo=f"e2el={s}s") for s in (20, 0.5))
    assert held.as_dict()["predicted"]["meets_slo"]
    data = missed.as_dict()
    assert data["predicted"]["e2el_ms"] > 500
    assert not data["predicted"]["meets_slo"]
    assert missed.knee == 0.0
    line, remarks = serve_command(held)
    assert "--slo" not in line, "the server has no such limit"
    assert any("e2el" in remark for remark in remarks)
    both, _ = serve_command(answer("llama-3.1-8b", rate=2.0, slo="ttft=1s,e2el=20s"))
    assert "--slo ttft=1000ms " in both + " "


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "mixtral-8x7b"])
@pytest.mark.parametrize(
    "load", [{"rate": 30.0}, {"rate": 400.0}, {"concurrency": 64}, {"concurrency": 2000}], ids=str
)
def test_no_more_run_than_may_and_no_split_serves_more(
    model: str, count: int, load: dict[str, float]
) -> None:
    plan = answer(model, count=count, workload="6000/200", **load)
    chosen, data = plan.advice.chosen, plan.as_dict()["predicted"]
    assert chosen is not None
    assert data["running"] / chosen.split.dp <= data["max_batch"] + 1e-6
    assert f"--max-num-seqs {data['max_batch']} " in serve_command(plan)[0]
    others = [o for o in plan.advice.options if o.split.pp == 1 and o.holds(None) >= chosen.holds(None)]
    assert chosen.capacity >= 0.95 * max(o.capacity for o in others)
    assert [reason[:2] for reason in plan.advice.reasons] == [
        f"{i}." for i in range(1, len(plan.advice.reasons) + 1)
    ]


def test_more_devices_a_replica_are_chosen_where_they_serve_more() -> None:
    plan = answer("llama-3.1-70b", count=4, concurrency=64, workload="6000/200")
    chosen = plan.advice.chosen
    assert chosen is not None
    least = next(o for o in plan.advice.options if o.memory.fits)
    assert chosen.split.tp > least.split.tp == 2
    assert "times the requests of" in " ".join(plan.advice.reasons)


def test_replicas_have_no_clients_that_do_not_exist() -> None:
    one = answer("llama-3.1-8b", concurrency=1, workload="1024/256").as_dict()
    eight = answer("llama-3.1-8b", count=8, concurrency=1, workload="1024/256", split="TP1").as_dict()
    for key in ("requests_per_s", "output_tokens_per_s", "running", "ttft_ms", "e2el_ms"):
        assert eight["predicted"][key] == pytest.approx(one["predicted"][key])
    assert eight["predicted"]["requests_per_s"] <= 1 / (eight["predicted"]["e2el_ms"] / 1e3) * 1.001
    for key in ("usd_per_million_input", "usd_per_million_output"):
        assert eight["cost"][key] == pytest.approx(8 * one["cost"][key]), "idle devices are paid for"


@pytest.mark.parametrize("clients", [1, 2, 3, 8, 12, 64])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_closed_loops_obey_little_over_all_replicas(clients: int, count: int) -> None:
    for option in answer("llama-3.1-8b", count=count, concurrency=clients).advice.options:
        if (e := option.estimate) is None:
            continue
        dp = option.split.dp
        assert dp <= clients
        assert e.concurrency * dp == pytest.approx(clients)
        assert e.rate * dp * e.e2el_s == pytest.approx(clients)
        assert option.capacity == pytest.approx(e.rate * dp)


def test_energy_of_a_token_counts_the_devices_that_run() -> None:
    def joules(**more: object) -> float:
        lines = explain(answer("llama-3.1-8b", concurrency=1, **more))
        return float(next(x.value for x in lines if x.name == "energy of a token out").split()[0])

    assert joules(count=8, split="TP1") == pytest.approx(8 * joules(count=1), rel=0.01)


def test_the_line_keeps_the_models_own_format() -> None:
    line, remarks = serve_command(answer("qwen3-235b-a22b-fp8", gpu="h200", count=4))
    assert "--quantize" not in line
    assert "--quantize int8" in serve_command(answer("qwen3-32b", count=2, quantize="int8"))[0]
    assert answer("deepseek-r1", gpu="h200", count=8).advice.chosen is not None
    mxfp4 = answer("gpt-oss-120b")
    assert mxfp4.question.precision == "mxfp4"
    assert any("holds MXFP4 weights as int8" in remark for remark in serve_command(mxfp4)[1])
    assert not any("MXFP4" in remark for remark in remarks)


def test_json_has_the_keys_of_the_issue() -> None:
    arguments = [
        "plan",
        "llama-3-70b",
        "--gpu",
        "h100",
        "--count",
        "8",
        "--context",
        "4096",
        "--json",
        "--explain",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    said = json.loads(result.output)
    assert said["memory"]["kv_bytes_per_token"] == 327_680
    assert said["memory"]["kv_bytes_per_request"] == 1_342_177_280
    assert said["predicted"]["ttft_ms"] > 0
    assert said["command"].startswith("quire serve llama-3-70b ")
    assert {x["name"] for x in said["explain"]} >= {"weights", "TTFT", "TPOT", "a million tokens out"}


def test_tables_print_and_status_says_whether_it_fits() -> None:
    done = CliRunner().invoke(
        app, ["plan", "qwen3-32b", "--gpu", "l4", "--count", "8", "--rate", "1", "--explain"]
    )
    assert done.exit_code == 0, done.output
    assert "quire serve qwen3-32b" in done.output
    assert CliRunner().invoke(app, ["plan", "llama-3.1-405b", "--gpu", "t4"]).exit_code == 2


def test_every_figure_is_explained() -> None:
    plan = answer("deepseek-v3", gpu="h200", count=8, quantize="fp8", rate=1.0)
    assert all(line.formula for line in explain(plan))
    assert "512 latent + 64 rope" in explain(plan)[0].formula


def test_the_line_has_only_flags_that_there_are() -> None:
    line, lacking = serve_command(answer("llama-3.1-70b", count=8, rate=5.0, quantize="int8"))
    result = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "300"})
    for flag in (word for word in line.split() if word.startswith("--")):
        assert flag in result.output
    assert "--quantize int8" in line
    assert any("of them" in x for x in lacking)


def test_whole_experts_are_a_flag_on_cpus() -> None:
    asked = question_of(PlanArgs("deepseek-v3", "epyc-9755", count=2, quantize="bf16"))
    plan = plan_capacity(replace(asked, hardware=replace(asked.hardware, domain=2)))  # two sockets
    assert plan.advice.chosen is not None
    assert (plan.advice.chosen.split.tp, plan.advice.chosen.split.ep) == (2, 2)
    line, lacking = serve_command(plan)
    assert "--tensor-parallel-size 2 --enable-expert-parallel" in line
    assert not any("expert" in remark for remark in lacking)


def test_search_prints_its_trials_and_needs_a_load_and_an_slo() -> None:
    arguments = [
        "plan",
        "llama-3.1-8b",
        "--gpu",
        "h100",
        "--count",
        "2",
        "--workload",
        "64/4",
        "--rate",
        "50",
        "--search",
    ]
    with pytest.raises(ConfigError, match="--slo"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    with pytest.raises(ConfigError, match="--rate"):
        CliRunner().invoke(app, [*arguments[:6], "--slo", "tpot=50ms", "--search"], catch_exceptions=False)
    done = CliRunner().invoke(app, [*arguments, "--slo", "ttft=1s,tpot=50ms", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)["search"]
    assert found["best"]["setting"] == {"tp": 1, "replicas": 1, "max_num_batched_tokens": 2048}
    assert found["best"]["share"] >= found["share"]


def test_trace_and_lengths() -> None:
    assert question_of(PlanArgs("quill", "h100", workload="512/64")).load.isl == 512
    with pytest.raises(ConfigError, match="--workload"):
        question_of(PlanArgs("quill", "h100", workload="many"))


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (PlanArgs("llama-3-8b", "h100", cpu=True), "--gpu NAME and --cpu"),
        (PlanArgs("llama-3-8b", "h100", quantize="int5"), "--quantize"),
        (PlanArgs("llama-3-8b", "h100", kv_dtype="int4"), "--kv-dtype"),
        (PlanArgs("llama-3-8b", "h100", rate=0.0), "--rate"),
        (PlanArgs("llama-3-8b", "h100", engine="mine"), "--engine"),
    ],
)
def test_wrong_flags_are_named(asked: PlanArgs, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        question_of(asked)


def test_an_unknown_model_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelLoadError, match="no preset"):
        question_of(PlanArgs("nothing-of-that-name", "h100"))


def held_points(shared_data: Path, keep: Callable[[dict[str, str]], bool]) -> list[Any]:
    """Return the aggregated points that the constants were not fitted on (docs/planner.md)."""
    points, _ = roofline_accuracy.read_points(shared_data / "gpu_profiles/measured_ttft_tpot.csv.gz", keep)
    return [p for p in points if p.mode == "agg" and not p.fitted_half]


def median_errors(points: list[Any]) -> tuple[float, float]:
    found = roofline_accuracy.errors(
        (p, roofline_accuracy.predict(p, efficiency_of(p.engine, p.hardware, p.spec, p.decode.precision)))
        for p in points
    )
    assert found is not None
    return found[0], found[2]


def test_dense_models_on_hopper_are_near_what_was_measured(shared_data: Path) -> None:
    dense = ("Llama-3.1-70B", "Llama-3.1-8B-Instruct", "Llama-3.1-8B-Instruct-FP8", "Qwen3-32B")
    held = held_points(
        shared_data,
        lambda row: row["system"] in ("h100_sxm", "h200_sxm") and row["model_path"].endswith(dense),
    )
    ttft, tpot = median_errors(held)
    assert len(held) > 200
    assert ttft <= 0.15
    assert tpot <= 0.12


@pytest.mark.slow
def test_models_with_experts_are_near_what_was_measured(shared_data: Path) -> None:
    held = held_points(
        shared_data,
        lambda row: row["system"] in ("h100_sxm", "h200_sxm", "b200_sxm") and "70B" not in row["model_path"],
    )
    ttft, tpot = median_errors([p for p in held if not p.dense])
    assert ttft <= 0.25
    assert tpot <= 0.16


def test_without_an_engine_a_plan_is_a_range() -> None:
    plan = answer("llama-3.1-8b", concurrency=16)
    figures = by_engine(plan)
    assert set(figures) == set(MEASURED)
    ends = spread(figures, "ttft_ms", plan.as_dict()["predicted"]["ttft_ms"])
    assert ends is not None
    assert ends[1] > 1.2 * ends[0]
    assert not by_engine(answer("llama-3.1-8b", concurrency=16, engine="vllm"))
    said = CliRunner().invoke(app, ["plan", "llama-3.1-8b", "--gpu", "h100", "--concurrency", "16"]).output
    assert "ms by engine" in said
    named = CliRunner().invoke(app, ["plan", "llama-3.1-8b", "--gpu", "h100", "--engine", "vllm"]).output
    assert "by engine" not in named

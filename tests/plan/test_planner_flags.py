"""What a plan can be asked: a split, a price, a prefix, drafts, an objective, limits by application, a comparison."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli import app
from quire.cli.flags import PlanArgs
from quire.config import DeviceInfo
from quire.cost.cost_model import CostModel, Curve
from quire.cost.hardware import find_hardware, hardware_named
from quire.cost.kept_profiles import profile_path
from quire.cost.profile import Profile
from quire.cost.split import Split
from quire.errors import ConfigError
from quire.slo import Slo
from quire_lab.cli.plan import hardware_of, question_of, serve_command
from quire_lab.plan.capacity import CapacityPlan, Option, plan_capacity
from quire_lab.plan.memory import kv_bytes_per_request


def answer(model: str = "llama-3.1-70b", gpu: str = "h100", **more: object) -> CapacityPlan:
    return plan_capacity(question_of(PlanArgs(model, gpu, **more)))  # type: ignore[arg-type]


def chosen(plan: CapacityPlan) -> Option:
    assert plan.advice.chosen is not None
    return plan.advice.chosen


def test_a_split_that_is_asked_for_is_the_only_one() -> None:
    plan = answer(count=8, split="TP4,PP2")
    assert [option.split for option in plan.advice.options] == [Split(tp=4, pp=2)]
    assert chosen(answer(count=8, split="tp=2")).split == Split(tp=2, dp=4)
    assert chosen(answer("mixtral-8x7b", count=4, split="TP4 EP4")).split.ep == 4
    assert answer(count=8, split="TP1").advice.chosen is None


def test_long_prompts_are_cut_by_their_threshold() -> None:
    long, short = {"workload": "20000/100"}, {"workload": "4000/100"}
    for workload, is_cut in ((long, True), (short, False)):
        whole, cut = (
            answer("llama-3.2-1b", **workload, long_prefill_token_threshold=num) for num in (0, 512)
        )
        assert (cut.question.chunk, whole.question.chunk) == (2048 if is_cut else 8192, 8192)
        assert (chosen(cut).estimate.ttft_s != chosen(whole).estimate.ttft_s) == is_cut
        assert "--long-prefill-token-threshold 512" in serve_command(cut)[0]
        assert "threshold" not in serve_command(whole)[0]
    assert (
        answer("llama-3.2-1b", **long, prefix=19_800, long_prefill_token_threshold=512).question.chunk == 8192
    )


def test_machines_that_share_no_memory_are_joined_by_ray() -> None:
    """A model that no machine holds alone: stages and ranks over the network are compared."""
    plan = answer("llama-3.3-70b", "ryzen-9950x", count=4, nodes=4)
    splits = [option.split for option in plan.advice.options]
    assert Split(tp=4) in splits
    assert Split(pp=4) in splits
    assert "ranks over the network" in plan.advice.reasons[1]
    line, _ = serve_command(plan)
    assert line.endswith("--executor ray --nodes 4")
    both = serve_command(answer("llama-3.3-70b", "ryzen-9950x", count=4, nodes=2, split="TP2,PP2"))[0]
    assert both.endswith("--executor ray --nodes 2")
    here = serve_command(answer("llama-3.2-1b", "ryzen-9950x", count=2, nodes=1, split="TP2"))[0]
    assert "ray" not in here
    alone = [option.split for option in answer("llama-3.3-70b", "ryzen-9950x", count=4).advice.options]
    assert {split.tp for split in alone} == {1}
    for more, match in {3: "--nodes 3 must divide --count 4", 2: "--nodes 2 is for CPUs"}.items():
        with pytest.raises(ConfigError, match=match):
            answer(gpu="h100" if more == 2 else "ryzen-9950x", count=4, nodes=more)


@pytest.mark.parametrize(
    ("split", "match"),
    [
        ("TP3", "TP3 must divide the 64 attention heads"),
        ("TP4,PP4", "needs 16 devices, and --count is 8"),
        ("TX2", "'TX2' must be one of TP, PP, EP, CP, DP"),
        ("TP2,TP4", "'TP4' must be one of"),
        ("TP2,EP2", "EP2 must equal TP2 and divide the experts; the model has no experts"),
    ],
)
def test_a_wrong_split_is_named(split: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        answer(count=8, split=split)


def test_the_price_is_the_rent_of_every_device() -> None:
    cost = answer(count=8, price=4.0).cost
    assert cost is not None
    assert cost.usd_per_hour == 32.0
    table = answer(count=8).cost
    assert table is not None
    assert table.usd_per_million_output is not None
    assert cost.usd_per_million_output == pytest.approx(table.usd_per_million_output * 4 / 2.69)


def test_a_cached_prefix_saves_prompt_time_and_memory() -> None:
    cold = answer(count=4, rate=4.0, workload="2080/100", split="TP4")
    warm = answer(count=4, rate=4.0, workload="2080/100", split="TP4", prefix=2000)
    assert chosen(cold).estimate is not None
    before, after = chosen(cold).estimate, chosen(warm).estimate
    assert before is not None
    assert after is not None
    assert after.prefill_s < before.prefill_s * 0.15  # 80 of 2,080 tokens, which still read all keys
    spec = warm.question.spec
    own = kv_bytes_per_request(spec, 2180) - kv_bytes_per_request(spec, 2000)
    assert warm.memory.kv_request_share == -(-own // 4)
    assert warm.memory.max_requests > 11 * cold.memory.max_requests


def test_drafts_give_tokens_per_round_for_the_time_of_a_round() -> None:
    plain = answer(count=4, split="TP4")
    drafted = answer(count=4, split="TP4", draft="llama-3.2-1b,0.7,4")
    q = drafted.question
    assert q.draft is not None
    assert q.draft.tokens_per_round == pytest.approx((1 - 0.7**5) / (1 - 0.7))
    replica = q.replica(Split(tp=4), drafted.memory)
    assert replica.drafting is not None
    one = question_of(PlanArgs("llama-3.2-1b", "h100", split="TP4", count=4))
    step = one.replica(Split(tp=4), one.memory(Split(tp=4))).decode_s(1, q.load)
    assert replica.drafting.propose_s(1, 1152) == pytest.approx(4 * step)
    free = answer(count=4, split="TP4", draft="ngram,0.7,4")
    times = [chosen(x).estimate.decode_s for x in (plain, drafted, free)]  # type: ignore[union-attr]
    assert times[2] < times[1] < times[0] / 1.5
    assert times[2] == pytest.approx(times[0] / q.draft.tokens_per_round, rel=0.05)
    assert drafted.memory.draft > 0
    assert drafted.memory.kv_pool == plain.memory.kv_pool - drafted.memory.draft


def test_useless_drafts_cost_time() -> None:
    times = [
        chosen(answer(count=4, split="TP4", concurrency=256, draft=draft)).estimate.tpot_s  # type: ignore[union-attr]
        for draft in (None, "llama-3.2-1b,0.0,4")
    ]
    assert times[1] > times[0]


def test_the_line_drafts_where_drafts_run() -> None:
    line, _ = serve_command(answer("llama-3.2-3b", "epyc-9755", draft="ngram,0.3,4"))
    assert "--speculate ngram --spec-tokens 4" in line
    line, lacking = serve_command(answer(draft="ngram,0.3,4", count=4))
    assert "--speculate" not in line
    assert any("--speculate on a GPU" in remark for remark in lacking)


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"draft": "llama-3.2-1b"}, "--draft 'llama-3.2-1b' must be MODEL,ACCEPTANCE,DRAFTS"),
        ({"draft": "ngram,1.5,4"}, "acceptance 1.5 must be in 0…1"),
        ({"draft": "ngram,0.5,0"}, "0 drafts a round must be in 1…"),
        ({"prefix": 1024}, "--prefix 1024 must be in 0…1023"),
        ({"price": 0.0}, "--price 0 must be more than 0"),
        ({"slo": "chats"}, "'chats' is not .* chat, code, voice, batch"),
        ({"compare": "nowhere.json"}, "--compare nowhere.json: cannot be read"),
    ],
)
def test_wrong_values_are_named(asked: dict[str, object], match: str) -> None:
    arguments = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    with pytest.raises(ConfigError, match=match):
        CliRunner().invoke(app, ["plan", "llama-3-8b", "--gpu", "h100", *arguments], catch_exceptions=False)


def test_ideal_is_the_floor_of_every_engine() -> None:
    steps = [
        chosen(answer(count=4, split="TP4", engine=engine)).estimate.decode_s  # type: ignore[union-attr]
        for engine in ("ideal", "vllm", "sglang", "trtllm", "default")
    ]
    assert steps[0] == min(steps)
    one = chosen(answer(gpu="a100", count=2, split="TP2", engine="ideal")).estimate
    assert one is not None
    assert one.decode_s == pytest.approx(0.0342, rel=0.05)  # 139 GB over 2 · 2,039 GB/s


def test_objectives_choose_by_what_they_name() -> None:
    load = {"count": 8, "rate": 5.0, "slo": "chat"}
    plans = {x: answer(objective=x, **load) for x in ("throughput", "latency", "cost")}
    slo = plans["cost"].question.slo
    holding = [o for o in plans["latency"].advice.options if o.split.pp == 1 and o.holds(slo)]
    assert chosen(plans["latency"]).e2el_s == min(o.e2el_s for o in holding)
    most = max(o.capacity for o in holding)
    assert chosen(plans["throughput"]).capacity >= 0.95 * most
    cheap = chosen(plans["cost"])
    assert cheap.holds(slo)
    assert cheap.split.num_devices == plans["cost"].devices_needed
    assert cheap.split.num_devices < chosen(plans["throughput"]).split.num_devices


def test_applications_have_limits_that_may_be_replaced() -> None:
    assert Slo.parse("chat") == Slo(0.5, 0.05)
    assert Slo.parse("chat,tpot=30ms,e2el=9s") == Slo(0.5, 0.03, 9.0)
    assert Slo.parse("batch") == Slo(e2el_s=60.0)
    with pytest.raises(ConfigError, match="not ttft"):
        Slo.parse("tpot=30ms,chat")


def test_a_plan_is_compared_with_its_own_json(tmp_path: Path) -> None:
    arguments = ["plan", "llama-3.1-8b", "--gpu", "h100", "--count", "4", "--rate", "5", "--slo", "chat"]
    first = CliRunner().invoke(app, [*arguments, "--json"])
    path = tmp_path / "plan.json"
    path.write_text(first.output)
    same = json.loads(CliRunner().invoke(app, [*arguments, "--json", "--compare", str(path)]).output)
    assert len(same["compare"]) == 13
    assert {row["ratio"] for row in same["compare"]} == {1.0}
    other = [*arguments, "--quantize", "fp8", "--compare", str(path)]
    rows = {r["name"]: r for r in json.loads(CliRunner().invoke(app, [*other, "--json"]).output)["compare"]}
    assert 0.5 < rows["weights, GiB"]["ratio"] < 0.6  # the table and the output matrix stay in bf16
    assert rows["TPOT, ms"]["this"] < rows["TPOT, ms"]["other"]
    shown = CliRunner().invoke(app, other).output
    assert "llama-3.1-8b fp8, 4 × h100" in shown
    path.write_text('{"model": 1}')
    with pytest.raises(ConfigError, match="it lacks hardware, memory"):
        CliRunner().invoke(app, other, catch_exceptions=False)


def test_a_plan_without_flags_is_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = DeviceInfo("cpu", "some CPU", 2, 16 << 30, 8 << 30, isa="avx512", native=True)
    gpu = DeviceInfo("cuda", "NVIDIA H100 80GB HBM3", 2, 80 << 30, 79 << 30)
    here = replace(find_hardware("epyc-9755"), name="this machine")
    monkeypatch.setattr("quire_lab.cli.plan.this_machine", lambda device, threads: here)
    monkeypatch.setattr("quire_lab.cli.plan.detect_device", lambda wanted: gpu if wanted == "auto" else cpu)
    assert hardware_of(PlanArgs("quill")).name == "h100"
    assert hardware_of(PlanArgs("quill", cpu=True)) == here
    monkeypatch.setattr("quire_lab.cli.plan.detect_device", lambda wanted: cpu)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["plan"])
    assert result.exit_code == 0, result.output
    assert "quire serve quill --max-model-len 8192" in result.output
    assert "# quire profile quill measures the steps" in result.output
    machine, settings = {"name": "x"}, {"dtype": "bfloat16", "kv_dtype": "bfloat16", "quantize": None}
    model = CostModel(0.002, Curve((1.0, 1025.0), (0.0, 0.1024)))
    Profile("quill", machine, settings, model, measured_at="2026-02-03T04:05:06+00:00").save(
        profile_path("quill", machine, settings)
    )
    said = CliRunner().invoke(app, ["plan", "--workload", "64/16"]).output
    assert (
        "measured here on 2026-02-03: a prompt of 64 tokens alone 8.3 ms, a decode step of 1 2.0 ms" in said
    )
    assert "measured here" not in CliRunner().invoke(app, ["plan", "--gpu", "h100"]).output


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla T4", "t4"),
    ],
)
def test_a_gpu_is_found_by_the_name_of_its_driver(name: str, key: str) -> None:
    assert hardware_named(name).name == key


def test_an_unknown_gpu_is_named() -> None:
    with pytest.raises(ConfigError, match="'NVIDIA TITAN V', is not in the hardware table"):
        hardware_named("NVIDIA TITAN V")


def test_the_line_proposes_the_context_of_the_model() -> None:
    def length(*flags: str) -> int:
        words = CliRunner().invoke(app, ["plan", "llama-3.1-8b", *flags]).output.split()
        return int(words[words.index("--max-model-len") + 1])

    assert length("--gpu", "h100", "--workload", "64/16") == 131_072
    assert 1280 < length("--gpu", "l4") < 131_072  # as far as the memory holds it
    assert length("--gpu", "h100", "--context", "4096") == 4096

"""What to turn on next: each change planned on its own, in the order of its effect on the objective."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from tests.families.published import PUBLISHED
from typer.testing import CliRunner

from quire.cli import app
from quire.cli.flags import PlanArgs
from quire_lab.cli.plan import question_of
from quire_lab.plan.advice import LEAST, Step, advice
from quire_lab.plan.capacity import CapacityPlan, plan_capacity

pytestmark = pytest.mark.component


def plan(model: str = "llama-3.1-70b", gpu: str = "h100", **more: object) -> CapacityPlan:
    return plan_capacity(question_of(PlanArgs(model, gpu, **more)))  # type: ignore[arg-type]


def again(step: Step, **asked: object) -> CapacityPlan:
    """Plan with the flag that the advice names."""
    words = shlex.split(step.flag)
    flags: dict[str, object] = {
        w[2:].replace("-", "_"): v for w, v in zip(words[::2], words[1::2], strict=True)
    }
    numbers = {k: int(v) for k, v in flags.items() if isinstance(v, str) and v.isdecimal()}
    return plan(**{**asked, **flags, **numbers})


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param("throughput", marks=pytest.mark.slow),
        "latency",
        pytest.param("cost", marks=pytest.mark.slow),
    ],
)
def test_each_effect_is_what_its_flag_gives(objective: str) -> None:
    asked: dict[str, object] = {"count": 8, "concurrency": 64, "objective": objective}
    now = plan(**asked)
    steps = advice(now)
    assert steps
    assert [s.effect for s in steps] == sorted((s.effect for s in steps), reverse=True)
    for step in steps:
        then = again(step, **asked).advice.chosen
        assert then is not None
        assert step.before is not None
        assert step.effect >= LEAST
        figures = {
            "throughput": (then.capacity, then.capacity / step.before),
            "latency": (then.e2el_s, step.before / then.e2el_s),
            "cost": (
                then.split.num_devices / then.capacity,
                step.before * then.capacity / then.split.num_devices,
            ),
        }
        assert (step.after, step.effect) == pytest.approx(figures[objective])


def test_advice_depends_on_the_workload() -> None:
    long = advice(plan(count=8, concurrency=64, workload="6000/50"))
    assert long[0].flag in ("--prefix 3000", "--count 16", "--quantize fp8")
    kinds = {s.flag.split()[0] for s in long}
    assert "--prefix" in kinds
    assert "--draft" not in kinds, "prompts take the time"
    alone = advice(plan(count=8, workload="64/500", objective="latency"))
    assert alone[0].flag == "--draft llama-3.2-1b,0.7,4"
    assert "--prefix" not in {s.flag.split()[0] for s in alone}


def test_more_tensor_parallelism_of_the_same_devices() -> None:
    steps = {s.flag: s for s in advice(plan(count=8, split="TP4,DP2", objective="latency"))}
    assert steps["--split TP8"].effect > 1.1


def test_what_is_on_is_not_suggested() -> None:
    more = {"quantize": "int4", "kv_dtype": "fp8", "prefix": 100, "draft": "ngram,0.3,4"}
    flags = {s.flag.split()[0] for s in advice(plan(count=4, concurrency=64, **more))}
    assert not flags & {"--quantize", "--kv-dtype", "--prefix", "--draft"}


def test_recurrent_layers_take_a_state_per_request_and_per_draft(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Qwen3.5-9B"][0]))
    config, asked = str(tmp_path / "config.json"), {"count": 1, "workload": "64/500"}
    found = plan(config, concurrency=8, **asked)
    drafted = plan(config, concurrency=8, draft="ngram,0.3,4", **asked)
    (ngram,) = [step for step in advice(found) if step.flag.startswith("--draft")]
    assert ngram.flag == "--draft ngram,0.3,4"
    assert not [step for step in advice(plan(config, concurrency=64, **asked)) if "--draft" in step.flag]
    per_token = 8 * 2 * 4 * 256 * 2  # eight layers attend
    state = 24 * 4 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128))
    assert found.memory.kv_bytes_per_request == found.memory.context * per_token + state
    num_slots = 8 * 4  # drafts of eight sequences
    assert found.memory.kv_pool - drafted.memory.kv_pool == num_slots * state


def test_what_makes_a_model_fit_comes_without_a_ratio() -> None:
    steps = advice(plan("llama-3.1-70b", count=1))
    assert {s.flag for s in steps} >= {"--quantize int4", "--count 2"}
    assert all(math.isinf(s.effect) and s.as_dict()["effect"] is None for s in steps)


def test_what_holds_the_slo_comes_first() -> None:
    steps = advice(plan(count=8, rate=22.0, slo="chat"))
    assert [s.holds for s in steps] == sorted((s.holds for s in steps), reverse=True)
    assert steps[0].holds
    assert not steps[-1].holds
    held = plan(count=8, rate=5.0, slo="chat")
    assert all(s.holds for s in advice(held))


def test_the_table_and_the_json_have_it() -> None:
    arguments = ["plan", "llama-3.1-8b", "--gpu", "l4", "--concurrency", "16"]
    shown = CliRunner().invoke(app, arguments).output
    said = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)["advice"]
    assert "what to turn on next" in shown
    for step in said:
        assert f"{step['effect']:.2f} × more" in shown


def test_no_rounding_is_advised_of_weights_that_a_file_holds_rounded() -> None:
    rounded = replace(question_of(PlanArgs("llama-3.1-8b", "h100")), precision="int8", own_precision="int8")
    assert not [step.flag for step in advice(plan_capacity(rounded)) if "--quantize" in step.flag]
    asked = replace(rounded, own_precision="bf16")
    assert [step.flag for step in advice(plan_capacity(asked)) if "--quantize" in step.flag]

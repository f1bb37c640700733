"""What `quire plan` and `quire doctor` say of files: flags that the engine takes, its bytes, measured KL."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.quant.checkpoints import make
from tests.quant.test_checkpoints import CASES
from typer.testing import CliRunner

from quire.args import EngineArgs
from quire.cli import app
from quire.cli.flags import PlanArgs
from quire.cost.fidelity import KV_CODES, MEASURED, way_of
from quire.cost.hardware import HERE, Hardware
from quire.cost.split import Split, shard_of
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.errors import ConfigError
from quire.models.hub import quill_path
from quire.weight_format import WeightFormat
from quire.weight_table import weight_table
from quire_lab.cli import plan as plan_command
from quire_lab.cli.plan import question_of, serve_command
from quire_lab.plan.advice import advice
from quire_lab.plan.capacity import CapacityPlan, plan_capacity

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FOLDERS = ("quill", "ct-int4-g32-asym", "ct-w8a8", "awq-g32", "gptq-8-bits")


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU with slow memory, where fewer bytes count, in place of measuring this one."""
    speeds = {"bf16": 2e12, "int8": 4e12}
    cpu = Hardware(HERE, "a CPU", "test", 16 << 30, 4e6, speeds, kind="cpu")
    monkeypatch.setattr(plan_command, "this_machine", lambda *_: cpu)


def folder(name: str, tmp_path: Path) -> str:
    """Return the path of a small model stored in the format ``name``."""
    if name == "quill":
        return str(quill_path("quill"))
    write, config, _ = CASES[name]
    return str(make(tmp_path, write, config).quantized)


def planned(model: str, **asked: Any) -> CapacityPlan:
    return plan_capacity(question_of(PlanArgs(model, cpu=True, workload="64/32", **asked)))


def settings(flags: str) -> dict[str, Any]:
    """Return the engine's settings among flags of `quire serve` or `quire plan`."""
    words = shlex.split(flags)
    known = EngineArgs.__dataclass_fields__
    pairs = {w[2:].replace("-", "_"): v for w, v in zip(words[::2], words[1::2], strict=True)}
    return {k: int(v) if v.isdecimal() else v for k, v in pairs.items() if k in known}


def configured(model: str, **engine: Any) -> Any:
    """Return the engine's configuration. Raises the errors of the engine."""
    return configure(
        EngineArgs(model=model, **engine), replace(detect_device("cpu"), memory_available_bytes=8 << 30)
    )[0]


@pytest.mark.parametrize("name", FOLDERS)
def test_the_engine_takes_each_flag_that_is_advised(name: str, tmp_path: Path) -> None:
    model = folder(name, tmp_path)
    found = planned(model, objective="latency")
    steps = advice(found)
    assert steps
    for step in steps:
        configured(model, **settings(step.flag))
    kinds = {step.flag.split()[0] for step in steps}
    assert ("--quantize" in kinds) <= (name == "quill")


@pytest.mark.parametrize("name", FOLDERS)
def test_each_form_has_the_engines_bytes_and_only_its_forms_are_named(name: str, tmp_path: Path) -> None:
    model = folder(name, tmp_path)
    found = {form.flag: form for form in planned(model).question.forms}
    refused = set()
    for quantize in (None, "none", "int8", "int4"):
        flag = "" if quantize is None else f"--quantize {quantize}"
        try:
            config = configured(model, quantize=quantize).model
        except ConfigError:
            refused.add(flag)
            continue
        if flag in found:
            assert found[flag].num_bytes == sum(
                row.num_bytes for row in weight_table(config.spec, config.dtype, config.formats)
            )
    assert not refused & set(found)
    assert (not refused) == (name == "quill")
    assert set(found) | refused | {"--quantize none"} == {
        "",
        "--quantize none",
        "--quantize int8",
        "--quantize int4",
    }


@pytest.mark.parametrize("name", FOLDERS)
def test_the_printed_line_serves_the_form_that_was_planned(name: str, tmp_path: Path) -> None:
    model = folder(name, tmp_path)
    for quantize in (None, "none", "bf16", "int8", "int4"):
        if quantize in ("int8", "int4") and name != "quill":
            with pytest.raises(ConfigError, match="quantized already"):
                configured(model, quantize=quantize)
            if question_of(PlanArgs(model, cpu=True)).own_precision != quantize:
                with pytest.raises(ConfigError, match="quantized already"):
                    planned(model, quantize=quantize)
            continue
        answer = planned(model, quantize=quantize)
        line, _ = serve_command(answer)
        taken = settings(line.partition(f"{shlex.quote(model)} ")[2])
        config = configured(model, **{k: v for k, v in taken.items() if k == "quantize"}).model
        q = answer.question
        shard = shard_of(q.spec, q.precision, Split(), q.stored)
        if quantize in (None, "none", "int8"):  # a plan counts int4 in groups of 32
            rows = weight_table(config.spec, "bfloat16", config.formats)
            assert shard.weight_bytes == pytest.approx(sum(row.num_bytes for row in rows), rel=0.01)


def test_fp8_on_a_cpu_is_planned_as_what_it_is_expanded_to(
    tmp_path: Path, fp8_folder: Callable[[Path], str]
) -> None:
    model = fp8_folder(tmp_path)
    found = planned(model)
    assert found.question.precision == "bf16"
    assert found.question.stored is None
    assert [form.flag for form in found.question.forms] == ["", "--quantize int8", "--quantize int4"]
    assert "--quantize" not in serve_command(found)[0]
    configured(model, quantize="int8")
    with pytest.raises(ConfigError, match="needs a GPU"):
        planned(model, quantize="fp8")


@pytest.fixture
def fp8_folder() -> Callable[[Path], str]:
    from tests.quant import checkpoints

    def write(tmp_path: Path) -> str:
        made = make(
            tmp_path,
            lambda rng, shape: checkpoints.fp8(rng, shape, (), "weight_scale"),
            FP8,
            change=checkpoints.as_fp8,
        )
        return str(made.quantized)

    return write


def test_formats_that_no_flag_makes_are_a_remark() -> None:
    for quantize, gpu in (("fp4", "b200"), ("mxfp4", "h100")):
        answer = plan_capacity(question_of(PlanArgs("llama-3.1-8b", gpu, quantize=quantize)))
        line, remarks = serve_command(answer)
        assert "--quantize" not in line
        assert any(f"rounds no weights to {quantize}" in remark for remark in remarks)
    answer = plan_capacity(question_of(PlanArgs("deepseek-v3", "b200", count=8, quantize="int4")))
    assert any("rounds plain weights" in remark for remark in serve_command(answer)[1])


def test_8_bits_of_k_and_v_are_advised_only_where_the_engine_has_them() -> None:
    def flags(model: str) -> set[str]:
        question = question_of(PlanArgs(model, "h100", count=16, concurrency=256, workload="8000/500"))
        return {step.flag.split()[0] for step in advice(plan_capacity(question))}

    assert "--kv-dtype" in flags("llama-3.1-70b")
    assert "--kv-dtype" not in flags("deepseek-v3")  # latents


def test_the_plan_and_the_doctor_show_forms_and_arithmetic(tmp_path: Path) -> None:
    model = folder("awq-g32", tmp_path)
    shown = CliRunner().invoke(app, ["plan", model, "--cpu"]).output
    for words in (
        "form of the weights",
        "as the files are",
        "--quantize none",
        "instructions here",
        "0.0010 … 0.0032",
    ):
        assert words in shown
    said = json.loads(CliRunner().invoke(app, ["plan", model, "--cpu", "--json"]).output)
    assert [form["flag"] for form in said["forms"]] == ["", "--quantize none"]
    assert {one["held"] for one in said["arithmetic"]} == {"int4, groups of 32 with offsets", "bfloat16"}
    doctor = CliRunner().invoke(app, ["doctor", model]).output
    assert "as the files are" in doctor
    assert "linears held as" in doctor


def test_figures_are_those_of_the_results() -> None:
    lines = [json.loads(line) for line in (RESULTS / "fidelity.jsonl").read_text().splitlines()]
    forms = {
        "plain": "expanded to bf16", "stored": "as stored", "int8": "expanded, `--quantize int8`",
        "int4": "expanded, `--quantize int4-g16`",
    }  # fmt: skip
    for way, form in forms.items():
        kl = [line["kl_mean"] for line in lines if line["form"].startswith(form)]
        assert (MEASURED[way].low, MEASURED[way].high) == (round(min(kl), 4), round(max(kl), 4)), way
    assert all((RESULTS / figure.source).exists() for figure in (*MEASURED.values(), *KV_CODES.values()))


def test_figures_of_the_cache_are_those_of_the_results() -> None:
    lines = [json.loads(line) for line in (RESULTS / "kv-codes.jsonl").read_text().splitlines()]
    kl = {(line["model"], line["kv_dtype"]): line["kl_mean"] for line in lines}
    for kv_dtype, figure in KV_CODES.items():
        added = [kl[model, kind] - kl[model, "auto"] for model, kind in kl if kind == kv_dtype]
        assert (figure.low, figure.high) == (round(min(added), 4), round(max(added), 4)), kv_dtype


def test_ways_of_formats() -> None:
    rotated = {"rotation": 64}
    assert way_of(WeightFormat(), is_stored=False) == "plain"
    assert way_of(WeightFormat("int8", **rotated), is_stored=False) == "int8"
    assert way_of(WeightFormat("int4", 16, **rotated), is_stored=False) == "int4"
    assert way_of(WeightFormat("int4", 32, **rotated), is_stored=False) == "int4 in groups"
    assert way_of(WeightFormat("int8", 32, **rotated), is_stored=False) == "int8 in groups"
    assert way_of(WeightFormat("int8"), is_stored=True) == "token"
    assert way_of(WeightFormat("int5", 32), is_stored=True) == "stored"

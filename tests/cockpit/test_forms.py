"""The forms have every setting of the command line, in words and units, and show its answers as pictures."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("nicegui", reason="the extra `cockpit` is not installed")

from quire.cli.flags import PlanArgs
from quire.executor.child_process import child_environment
from quire_lab.cli.cockpit import HIDDEN, commands_of
from quire_lab.cli.plan import question_of, serve_command
from quire_lab.cockpit.fields import FIRST, LOOKS, command_arguments, in_labels
from quire_lab.cockpit.forms import Commands, command_line, command_picture
from quire_lab.cockpit.results import Request, plan_picture, simulate_picture
from quire_lab.cockpit.watched import Failed
from quire_lab.learn.picture import Bars, Facts, Lines, Picture
from quire_lab.plan.advice import advice
from quire_lab.plan.capacity import plan_capacity

COMMANDS = msgspec.json.decode(commands_of(local=True), type=Commands)
BOTH = pytest.mark.parametrize("command", ["plan", "simulate"])


def terminal(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "quire.cli", *arguments],
        capture_output=True,
        text=True,
        env=child_environment() | {"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"},
    ).stdout


def planned(**asked: Any) -> Picture:
    """The picture of a plan, without a process."""
    answer = plan_capacity(question_of(PlanArgs(**{"model": "llama-3.1-8b", "gpu": "h100", **asked})))
    command, remarks = serve_command(answer)
    said = answer.as_dict() | {"command": command, "remarks": remarks}
    return plan_picture(said | {"advice": [step.as_dict() for step in advice(answer)]})


@BOTH
def test_a_form_has_every_flag_of_its_command(command: str) -> None:
    said = terminal(command, "--help-all")
    flags = {flag.flag for flag in COMMANDS.flags[command] if flag.flag}
    for flag in flags:
        assert flag in said
    words = set(re.findall(r"^│ (--[\w-]+)", said, re.MULTILINE))
    assert words == flags | (words & {"--" + name.replace("_", "-") for name in HIDDEN})


def test_every_setting_has_a_label_in_words() -> None:
    """A new flag of the two commands needs a label, and a unit if it is a quantity, in cockpit/fields.toml."""
    names = {flag.name for flags in COMMANDS.flags.values() for flag in flags}
    assert names == set(LOOKS)
    for name, look in LOOKS.items():
        assert "_" not in look.label, name
        assert not look.label.startswith("-"), name


@BOTH
def test_what_a_form_shows_first_is_a_setting_of_it(command: str) -> None:
    assert set(FIRST[command]) <= {flag.name for flag in COMMANDS.flags[command]}


def test_only_what_is_filled_in_is_an_argument() -> None:
    values = {"model": "llama-3.1-8b", "gpu": "h100", "count": "", "explain": True, "cpu": False}
    arguments = command_arguments(COMMANDS.flags["plan"], values)
    assert arguments == ["llama-3.1-8b", "--gpu", "h100", "--explain"]
    assert command_line("plan", arguments) == "quire plan llama-3.1-8b --gpu h100 --explain"


def test_fields_with_units_make_one_setting() -> None:
    values = {"workload.prompt": "1024", "workload.answer": "256", "slo.ttft": "500", "slo.e2el": "9000"}
    arguments = command_arguments(COMMANDS.flags["plan"], values)
    assert arguments == ["--workload", "1024/256", "--slo", "ttft=500ms,e2el=9000ms"]


def test_this_machine_replaces_the_device() -> None:
    assert command_arguments(COMMANDS.flags["plan"], {"gpu": "h100", "cpu": True}) == ["--cpu"]


def test_a_flag_that_is_on_is_turned_off_by_its_negative() -> None:
    flags = COMMANDS.flags["simulate"]
    assert command_arguments(flags, {"enable_prefix_caching": True}) == []
    assert command_arguments(flags, {"enable_prefix_caching": False}) == ["--no-prefix-caching"]


def test_a_problem_is_told_in_the_words_of_the_form() -> None:
    said = in_labels("--rate 0 must be more than 0; see --not-of-it", COMMANDS.flags["plan"])
    assert said == "“Requests arrive at” 0 must be more than 0; see --not-of-it"
    assert in_labels("settings: count = 0 is wrong", COMMANDS.flags["plan"]) == "“Devices” = 0 is wrong"
    with pytest.raises(Failed, match="--rate"):
        asyncio.run(command_picture("plan", ["llama-3.1-8b", "--gpu", "h100", "--rate", "-1"], local=True))


def test_a_remote_page_names_no_file_of_the_server(tmp_path: Path) -> None:
    with pytest.raises(Failed, match=re.escape("only a page on 127.0.0.1")):
        asyncio.run(command_picture("plan", [str(tmp_path), "--gpu", "h100"], local=False))


def test_a_plan_is_shown_with_memory_targets_and_advice() -> None:
    picture = planned(rate=4.0, slo="ttft=500ms,tpot=50ms")
    assert picture.title.endswith("it fits and holds the targets")
    parts = {part.title: part for part in picture.parts}
    memory = next(part for title, part in parts.items() if title.startswith("Memory"))
    assert isinstance(memory, Bars)
    assert sum(values[0] for values in memory.bars.values()) == pytest.approx(80, abs=0.01)
    first = parts["Time to first token"]
    assert isinstance(first, Bars)
    assert first.bars["target, at most"] == (500.0,)
    assert isinstance(parts["What would help"], Bars)
    assert picture.fact("Price of the devices") == pytest.approx(2.69, rel=0.5)


def test_a_plan_that_does_not_fit_says_so() -> None:
    picture = planned(model="llama-3.1-70b")
    assert picture.title.endswith("it does not fit")
    bars = next(part for part in picture.parts if isinstance(part, Bars))
    assert all(values[0] >= 0 for values in bars.bars.values())


def test_a_simulation_is_shown_as_distributions_and_levels() -> None:
    picture = asyncio.run(
        command_picture(
            "simulate",
            ["--hardware", "h100", "--model", "llama-3.1-8b", "--rate", "8", "--limit", "40"],
            local=True,
        )
    )
    assert isinstance(picture.parts[0], Facts)
    speed, level = (part for part in picture.parts if isinstance(part, Lines))
    assert [line.name for line in speed.lines] == ["first token", "per output token", "whole answer"]
    assert all(line.y[-1] == 100 for line in speed.lines)
    assert level.lines[1].y[-1] == 0


SUMMARY: dict[str, Any] = {
    "requests_per_s": 4.0, "goodput_per_s": 3.5, "output_tokens_per_s": 100.0, "num_failed": 0, "duration_s": 10.0,
    "num_requests": 2, "num_completed": 2, "slo": {"ttft_ms": 500.0}, "run": {"model": "m", "machine": "1 × X"},
    "ttft_ms": {"p50": 10.0, "p99": 20.0}, "tpot_ms": {"p50": 5.0, "p99": 6.0},
    "simulation": {"kv_peak": 0.5, "end_s": 10.0, "replicas": [{"replica": 0, "busy_s": 5.0}]},
}  # fmt: skip


def test_a_sweep_has_one_axis_of_load() -> None:
    points = [{**SUMMARY, "offered_per_s": x} for x in (8.0, 4.0)]
    picture = simulate_picture(SUMMARY | {"sweep": points, "knee_per_s": 6.0}, [])
    throughput, latency = (part for part in picture.parts if isinstance(part, Lines))
    assert throughput.x == latency.x
    assert throughput.lines[0].x == (4.0, 8.0)
    assert picture.fact("Goodput falls beyond") == 6.0


def test_requests_without_an_answer_are_not_drawn() -> None:
    requests = [Request(0.0, 1.0, 0.5, 11), Request(0.0, None, None, 0)]
    speed = next(part for part in simulate_picture(SUMMARY, requests).parts if isinstance(part, Lines))
    assert [line.x for line in speed.lines] == [(500.0, 500.0), (50.0, 50.0), (1000.0, 1000.0)]
    assert speed.marks == ((500.0, "TTFT target"),)


def test_an_experiment_is_a_curve_for_each_variant() -> None:
    runs = [{"variant": v, "rate": x, **SUMMARY} for v in ("a", "b") for x in (2, 1)]
    said = {"scenario": "s", "title": "T", "answer": "it helps", "figures": {"gain": 2.0}, "runs": runs}
    lines = [part for part in simulate_picture(said, []).parts if isinstance(part, Lines)]
    assert [line.name for line in lines[0].lines] == ["a", "b"]
    assert lines[0].lines[0].x == (1, 2)

"""Ticks of the engine's loop: what a late one means, and what makes none late."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.engine.toy import engine_config
from tests.fakes.engine import build
from tests.scheduler.harness import request

from quire.clock import VirtualClock
from quire.engine.core import EngineCore
from quire.engine.heartbeat import SLOW_START_S, HangWatch, Heartbeat, Ticker
from quire.scheduler.predictor import FIRST_STEP_S, Predictor
from quire.scheduler.scheduler import Scheduler, describe
from quire.step import SeqPlan, StepPlan


class Watched:
    """A watch on a virtual clock that looks every 0.1 s, unless it sleeps."""

    def __init__(self, folder: Path) -> None:
        self.page = Heartbeat(folder / "page")
        self.watch = HangWatch(Heartbeat(folder / "page"), 100.0)
        self.now_s = 100.0

    def pass_time(self, seconds: float, *, beats: bool = False) -> None:
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            if beats:
                self.page.beat(self.now_s, 0.05, 7)
            self.pulse = self.watch.look(self.now_s)


def test_a_step_is_hung_soon_after_twice_its_time(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.page.beat(100.0, 3.0, 9)
    watched.pass_time(6.7)
    assert not watched.pulse.is_hung
    watched.pass_time(0.1)
    assert watched.pulse.is_hung
    assert watched.pulse.step == 9
    assert watched.pulse.overdue_s == pytest.approx(3.8)
    watched.pass_time(0.1, beats=True)
    assert not watched.pulse.is_hung
    assert watched.pulse.age_s == pytest.approx(0.0)


def test_an_engine_that_loads_never_hangs(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.pass_time(1000.0)
    assert watched.pulse.is_loading
    assert not watched.pulse.is_hung


def test_time_that_the_watch_slept_through_does_not_count(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.pass_time(1.0, beats=True)
    watched.now_s += 8 * 3600  # a laptop that slept, with all of its processes
    assert not watched.watch.look(watched.now_s).is_hung
    watched.pass_time(0.2)
    assert not watched.pulse.is_hung
    watched.pass_time(0.5)
    assert watched.pulse.is_hung, "the engine did not come back with it"


def test_the_age_counts_from_the_tick_and_not_from_the_look(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.pass_time(1.0, beats=True)
    watched.page.beat(watched.now_s + 0.1, 0.0, 8)
    watched.now_s += 0.4
    assert watched.watch.look(watched.now_s).age_s == pytest.approx(0.3)


class Noted(Heartbeat):
    """Keeps every tick."""

    def beat(self, now_s: float, predicted_s: float, step: int) -> None:
        self.ticks = [*getattr(self, "ticks", []), (predicted_s, step)]


def ticking(core: EngineCore, folder: Path) -> Noted:
    page = Noted(folder / "page")
    core.on_tick = Ticker(page, core.scheduler, core.clock)
    return page


def toy_core() -> EngineCore:
    config = engine_config()
    return EngineCore(Scheduler(config.scheduler, config.cache), build(config, ""), VirtualClock())


def test_the_loop_ticks_before_each_step(tmp_path: Path) -> None:
    core = toy_core()
    page = ticking(core, tmp_path)
    core.put(request("a", prompt=range(40), max_tokens=5))
    while core.has_work:
        core.step()
    assert [step for _, step in page.ticks] == list(range(5))
    assert page.ticks[0][0] == FIRST_STEP_S
    assert page.ticks[1][0] < FIRST_STEP_S


def test_the_dump_names_the_requests_of_the_step() -> None:
    core = toy_core()
    core.put(request("slow", prompt=range(40), max_tokens=5))
    core.begin()
    (plan,) = core.out
    assert isinstance(plan, StepPlan)
    text = describe(core.scheduler, plan)
    assert "step 0: 1 sequences, 1 of them new" in text
    assert "(request slow sample 0): tokens 0…39" in text


def test_prompts_lengthen_the_prediction() -> None:
    predictor = Predictor()
    assert predictor.expected_s(1) == FIRST_STEP_S
    decode, chunk = SeqPlan(0, 0, 10, 1), SeqPlan(1, 0, 0, 100)
    for step in range(50):
        predictor.note([decode], step, step + 0.1, num_prompt_tokens=0)
    assert predictor.expected_s(0) == pytest.approx(0.1)
    predictor.note([decode, chunk], 100.0, 102.0, num_prompt_tokens=100)
    assert predictor.expected_s(1000) > 1000 * 0.02


def test_one_hang_does_not_make_the_next_one_harder_to_see() -> None:
    predictor = Predictor()
    decode = SeqPlan(0, 0, 10, 1)
    for step in range(50):
        predictor.note([decode], step, step + 0.1, num_prompt_tokens=0)
    predictor.note([decode], 50.0, 350.0, num_prompt_tokens=0)
    assert predictor.expected_s(0) < 0.2
    for step in range(50):  # but a machine that is slower from now on is learned
        predictor.note([decode], 400.0 + 9 * step, 408.0 + 9 * step, num_prompt_tokens=0)
    assert predictor.expected_s(0) > 2.0


def test_a_grammar_or_an_adapter_lengthens_the_prediction(tmp_path: Path) -> None:
    core = toy_core()
    page = ticking(core, tmp_path)
    core.put(request("plain", prompt=range(4), max_tokens=2))
    core.put(replace(request("g", prompt=range(4), max_tokens=3), grammar='{"grammars": []}'))
    while core.has_work:
        core.step()
    assert page.ticks[0][0] > SLOW_START_S + FIRST_STEP_S - 1.0
    assert page.ticks[1][0] < 1.0

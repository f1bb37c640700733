"""Policies: which are on, when they come on, and the one that docs/howto-request.md adds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from tests.scheduler.harness import Engine, make_scheduler, oracle, request

from quire.request import Deadline, Request, Tenant, Terms
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.settings import PolicyChange
from quire.scheduler.state import SchedulerState

ROOT = Path(__file__).resolve().parents[2]
PLAIN = """
import sys
from quire.config import CacheConfig, SchedulerConfig
from quire.request import Request, SamplingParams
from quire.scheduler.scheduler import Scheduler
from quire.step import SeqResult, StepResult
scheduler = Scheduler(SchedulerConfig(), CacheConfig(64))
sampling = SamplingParams(max_tokens=3, seed=0, n=2)
scheduler.add(Request("a", (1, 2, 3), sampling, 0.0), 0.0)
while (plan := scheduler.plan(0.0)) is not None:
    ends = [p.num_computed_tokens + p.num_scheduled_tokens for p in plan.seqs]
    results = [SeqResult(p.seq_id, p.epoch, (5,) if end > 2 else ()) for p, end in zip(plan.seqs, ends)]
    scheduler.apply(StepResult(plan.step, tuple(results)), 0.0)
assert scheduler.stats().num_finished == 2
print([name for name in sys.modules if name.startswith("quire.scheduler.policies.")])
"""


def names(scheduler: Scheduler) -> set[str]:
    return set(scheduler.policies)


def test_plain_requests_load_no_policy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("config", "on"),
    [
        ({}, set()),
        ({"order": "priority"}, {"order"}),
        ({"order": "fair"}, {"fair"}),
        ({"order": "deadline"}, {"earliest_deadline"}),
        ({"gate": "static"}, {"gate"}),
        ({"max_loras": 2}, {"adapters"}),
        ({"max_num_drafts": 3}, {"drafts"}),
        ({"max_ttft_s": 1.0}, {"overload"}),
        ({"long_prefill_token_threshold": 8}, {"long_prompts"}),
        ({"long_prefill_token_threshold": 8, "enable_chunked_prefill": False}, set()),
    ],
)
def test_settings_turn_policies_on(config: dict[str, Any], on: set[str]) -> None:
    assert names(make_scheduler(**config)) == on


@pytest.mark.parametrize(
    ("change", "on"),
    [
        (lambda one: one, set()),
        (lambda one: replace(one, terms=Terms(Tenant("t"))), {"fair"}),
        (lambda one: replace(one, terms=Terms(deadline=Deadline(total_s=9.0))), {"deadlines", "overload"}),
        (lambda one: request("beams", n=2, use_beam_search=True, temperature=0.0), {"beams"}),
    ],
    ids=["plain", "tenant", "deadline", "beams"],
)
def test_a_request_turns_on_what_it_needs(change: Callable[[Request], Request], on: set[str]) -> None:
    scheduler = make_scheduler()
    scheduler.add(change(request("a")), 0.0)
    assert names(scheduler) == on


def test_the_shared_state_stays_small() -> None:
    assert len(fields(SchedulerState)) <= 17


def test_a_full_queue_turns_overload_on() -> None:
    scheduler = make_scheduler(max_queue=1)
    scheduler.add(request("a"), 0.0)
    assert names(scheduler) == set()
    (event,) = scheduler.add(request("b"), 0.0)
    assert event.error_kind == "capacity"
    assert names(scheduler) == {"overload"}


def test_a_policy_goes_off_with_its_setting() -> None:
    scheduler = make_scheduler(gate="static", order="priority")
    scheduler.change_policy(PolicyChange(gate="continuous", order="fcfs"))
    assert names(scheduler) == set()


def test_books_outlive_a_change_of_the_order() -> None:
    scheduler = make_scheduler(order="fair")
    scheduler.change_policy(PolicyChange(order="fcfs"))
    assert names(scheduler) == {"fair"}


def test_the_policy_of_the_how_to() -> None:
    page = (ROOT / "docs" / "howto-request.md").read_text()
    section = page.partition("\n## Add a policy")[2].partition("\n## ")[0]
    code, call = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert code.count("\n") <= 34
    module: dict[str, Any] = {}
    exec(code, module)
    scheduler = make_scheduler(max_num_seqs=6)
    exec(call, module | {"scheduler": scheduler})
    engine = Engine(scheduler)
    asked = [
        replace(request(f"{tenant}{i}"), terms=Terms(Tenant(tenant)))
        for tenant in ("a", "b")
        for i in range(4)
    ]
    engine.put(asked)
    most = Counter[str]()
    while engine.core.has_work:
        engine.step()
        stats = engine.scheduler.stats()
        most["all"] = max(most["all"], stats.num_running)
    assert most["all"] == 4, "two of each tenant, though there are six seats"
    for one in asked:
        assert engine.tokens(one.request_id) == oracle(one)

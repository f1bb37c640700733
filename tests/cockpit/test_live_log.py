"""What `TakeLive` tells of a core, and that a core without readers keeps nothing for it."""

from __future__ import annotations

from typing import Any

from tests.fakes.executor import FakeExecutor
from tests.scheduler.harness import MODEL, make_scheduler, request

from quire.clock import VirtualClock
from quire.engine.core import EngineCore
from quire.engine.messages import TakeLive
from quire.scheduler.live import CACHED, IDLE_S, OWNED, SHARED

STEP_S = 0.01


class Live:
    """A core over the fake executor, on a clock that goes on by `STEP_S` a step."""

    def __init__(self, **config: Any) -> None:
        self.clock = VirtualClock()
        scheduler = make_scheduler(**config)
        executor = FakeExecutor(scheduler.cache.config, model=MODEL)
        self.core = EngineCore(scheduler, executor, self.clock)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.core.step()
            self.clock.advance_to(self.clock.now() + STEP_S)

    def read(self) -> dict[str, Any]:
        self.core.put(TakeLive("1"))
        self.core.begin()
        if self.core.out:
            self.core.finish()
        return self.core.replies.pop().values


def test_rows_say_what_each_sequence_did() -> None:
    live = Live(max_num_batched_tokens=8)
    live.read()
    live.core.put(request("long", 20, max_tokens=8))
    live.steps(5)
    told = live.read()
    (seq,) = told["seqs"]
    assert seq[1:5] == ("long", 0, "running", 20)
    assert [chunk[3] for chunk in told["chunks"]] == [8, 8, 4]
    (decode,) = told["decodes"]
    assert decode[3] == 2
    assert told["steps"]["tokens"] == 22
    assert told["steps"]["prompt_tokens"] == 20
    assert [new[:3] for new in told["new"]] == [(seq[0], 0, 20)]


def test_a_reply_says_only_what_is_new() -> None:
    live = Live()
    live.core.put(request("a", 8, max_tokens=20))
    live.read()
    live.steps(3)
    assert live.read()["steps"]["count"] == 4  # one of them came with the first reading
    told = live.read()
    assert told["steps"]["count"] == 1
    assert told["chunks"] == []


def test_blocks_are_coloured_by_owner_and_sharing() -> None:
    live = Live()
    prompt = list(range(100, 112))
    live.core.put(request("a", [*prompt, 1], max_tokens=30))
    live.core.put(request("b", [*prompt, 2], max_tokens=30))
    live.steps(2)
    told = live.read()
    cells = list(told["blocks"])
    assert told["blocks_per_cell"] == 1
    assert cells.count(SHARED) == 3
    assert {cell for cell in cells if cell >= OWNED} == {OWNED + seq[0] % 250 for seq in told["seqs"]}


def test_the_tree_counts_hits_of_a_shared_prefix() -> None:
    live = Live()
    prompt = list(range(100, 116))
    for name in ("a", "b", "c"):
        live.core.put(request(name, [*prompt, ord(name)], max_tokens=2))
        live.steps(4)
        told = live.read()
    assert CACHED in told["blocks"]
    while "tree" not in told:
        told = live.read()
    root = told["tree"][0]
    assert root[1:4] == (-1, 0, 4)
    assert root[5] == 2


def test_a_preempted_sequence_is_admitted_with_a_new_epoch() -> None:
    live = Live(num_blocks=10, max_num_seqs=4)
    live.read()
    for name in "abc":
        live.core.put(request(name, 12, max_tokens=14))
    epochs = set()
    for _ in range(60):
        live.steps(1)
        epochs |= {new[1] for new in live.read()["new"]}
    assert epochs >= {0, 1}


def test_a_core_without_readers_keeps_no_steps() -> None:
    live = Live()
    live.core.put(request("a", 8, max_tokens=50))
    live.steps(2)
    assert live.core.live is None
    live.read()
    assert live.core.live is not None
    live.clock.advance_to(live.clock.now() + IDLE_S + 1)
    live.steps(1)
    assert live.core.live is None


def test_shared_beginnings_of_prompts_are_counted() -> None:
    live = Live(block_size=4)
    live.read()
    for name in ("a", "b"):
        live.core.put(request(name, range(18), max_tokens=1))
    live.steps(4)
    sums = live.read()["steps"]
    assert sums["new_tokens"] == 36
    assert sums["shared_tokens"] == 16

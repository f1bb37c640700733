"""Adapter slots by hand: which sequences enter, which wait and for how long, and which adapter is evicted."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.fakes.executor import FakeExecutor
from tests.fakes.integrity import check_integrity
from tests.fakes.model import fake_tokens

from quire.config import CacheConfig, SchedulerConfig
from quire.request import Adapter, FinishReason, Request, SamplingParams, TokenEvent
from quire.scheduler.scheduler import Scheduler
from quire.step import AdapterMove

A, B, C, D = (Adapter(name, f"/{name}", f"key-{name}", 4) for name in "abcd")


@dataclass
class Bench:
    """Scheduler and fake executor, stepped by hand."""

    max_loras: int
    max_num_seqs: int = 8
    ended: dict[str, int] = field(default_factory=dict)  # request → the step that ended it
    moves: list[AdapterMove] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    refused: dict[str, TokenEvent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cache = CacheConfig(num_blocks=200, block_size=4)
        config = SchedulerConfig(max_num_seqs=self.max_num_seqs, max_loras=self.max_loras, max_model_len=200)
        self.scheduler = Scheduler(config, cache)
        self.executor = FakeExecutor(cache)
        self.step_index = 0

    def add(self, name: str, adapter: Adapter | None, max_tokens: int = 4) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0)
        request = Request(name, (5, 6, 7), sampling, arrival_s=float(len(self.tokens)), adapter=adapter)
        self.tokens[name] = []
        for event in self.scheduler.add(request, request.arrival_s):
            self.refused[event.request_id] = event

    def step(self) -> set[str]:
        """One step; return the requests that had a row in it."""
        plan = self.scheduler.plan(100.0)
        if plan is None:
            return set()
        self.moves += plan.adapter_moves
        self.executor.submit(plan)
        events = self.scheduler.apply(self.executor.collect(), 100.0)
        check_integrity(self.scheduler)
        assert not self.executor.violations
        for event in events:
            self.tokens[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                self.ended[event.request_id] = self.step_index
        self.step_index += 1
        return {event.request_id for event in events}

    def run(self) -> None:
        for _ in range(500):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("no end")


def test_an_adapter_without_a_slot_waits_and_others_pass() -> None:
    bench = Bench(max_loras=2)
    for name, adapter in (("a", A), ("b", B), ("c", C), ("base", None), ("b2", B)):
        bench.add(name, adapter)
    # c waits; the base passes it; b2 too: the slot that c waits for is a's, loaded first.
    assert bench.step() == {"a", "b", "base", "b2"}
    assert bench.moves == [AdapterMove(1, A), AdapterMove(2, B)]
    bench.add("a2", A)
    assert bench.step() == {"a", "b", "base", "b2"}, "a2 would keep a's slot in use"
    bench.run()
    assert bench.moves[2] == AdapterMove(1, C), "c takes the slot that a left"
    assert set(bench.ended) == set(bench.tokens)


def test_no_sequence_starves_behind_a_stream_of_newcomers() -> None:
    """Requests of two adapters arrive for ever; those of two others, and more of each, come in between."""
    bench = Bench(max_loras=2, max_num_seqs=6)
    for name, adapter in (("a", A), ("b", B), ("c", C), ("d", D)):
        bench.add(name, adapter, max_tokens=6)
    for index in range(60):
        bench.step()
        bench.add(f"a{index}", A)
        bench.add(f"b{index}", B)
    assert bench.ended["c"] < 20
    assert bench.ended["d"] < 20
    bench.run()
    assert set(bench.ended) == set(bench.tokens)


def test_least_recently_used_goes_and_idle_is_not_reloaded() -> None:
    bench = Bench(max_loras=2)
    for name, adapter in (("a", A), ("b", B), ("a2", A), ("c", C), ("a3", A), ("b2", B)):
        bench.add(name, adapter, max_tokens=2)
        bench.run()
    assert bench.moves == [
        AdapterMove(1, A), AdapterMove(2, B), AdapterMove(2, C), AdapterMove(2, B)
    ]  # fmt: skip


def test_tokens_and_cached_blocks_are_each_adapters_own() -> None:
    bench = Bench(max_loras=3)
    adapters = {"base": None, "a": A, "b": B, "again": A}
    for name, adapter in adapters.items():
        bench.add(name, adapter, max_tokens=20)
    bench.run()
    for name, adapter in adapters.items():
        expected = fake_tokens((5, 6, 7), SamplingParams(temperature=0.0, seed=0), 0, 20, adapter=adapter)
        assert bench.tokens[name] == expected
    assert bench.tokens["a"] == bench.tokens["again"] != bench.tokens["b"]


def test_without_slots_a_request_with_an_adapter_is_refused() -> None:
    bench = Bench(max_loras=0)
    bench.add("a", A)
    event = bench.refused["a"]
    assert event.finish_reason is FinishReason.ERROR
    assert event.error_kind == "never_fits"
    assert "--max-loras" in (event.error or "")


def test_one_content_under_two_names_takes_one_slot() -> None:
    bench = Bench(max_loras=1)
    bench.add("one", A)
    bench.add("two", A._replace(name="other", path="/other"))
    assert bench.step() == {"one", "two"}
    assert len(bench.moves) == 1

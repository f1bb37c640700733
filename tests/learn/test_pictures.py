"""What the simulations show agrees with the engine: sums, laws, and the same text without the simulation."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from quire.errors import ConfigError
from quire.request import SamplingParams
from quire_lab.learn.allocation import contiguous, paged
from quire_lab.learn.contiguous import ContiguousPool
from quire_lab.learn.decode_loop import SIMULATION as DECODE_LOOP
from quire_lab.learn.draw import draw
from quire_lab.learn.flash_attention import Tiled, check
from quire_lab.learn.picture import Bars, Grid, Lines, Picture, Table, Timeline
from quire_lab.learn.quill import decode, engine, speculate
from quire_lab.learn.registry import SIMULATIONS
from quire_lab.plan.laws import attention_traffic

ROOT = Path(__file__).resolve().parents[2]
NINETEEN = {
    "request-lifecycle", "decode-loop", "stop-rules", "prefill-decode", "no-kv-cache", "generate-loop", "kv-growth",
    "memory-hierarchy", "latency-metrics",
    "throughput-latency", "batching", "flash-attention", "paged-attention", "speculation", "gpu-memory", "parallelism",
    "prefix-cache", "disaggregation", "production-server",
}  # fmt: skip


@cache
def picture(name: str) -> Picture:
    return SIMULATIONS[name].run()


def fact(name: str, text: str) -> float:
    value = picture(name).fact(text)
    assert isinstance(value, int | float)
    return value


def test_there_are_nineteen_and_the_page_names_them() -> None:
    assert set(SIMULATIONS) == NINETEEN
    page = (ROOT / "docs" / "learn.md").read_text()
    assert all(f"`{name}`" in page for name in NINETEEN)


def test_the_three_gates_differ_at_the_defaults() -> None:
    idle = [fact("batching", f"{gate} batching") for gate in ("static", "dynamic", "continuous")]
    assert idle[0] > 1.1 * idle[1] > 1.2 * idle[2]


@pytest.mark.parametrize("name", sorted(NINETEEN))
def test_compared_charts_have_one_x_axis(name: str) -> None:
    ends: dict[str, set[tuple[float, float] | None]] = {}
    for part in picture(name).parts:
        if isinstance(part, Lines | Timeline):
            ends.setdefault(str(part.x), set()).add(part.x.ends)
    assert all(len(found) == 1 for found in ends.values())


def test_prompts_and_decodes_differ_without_colours() -> None:
    out = Console(file=io.StringIO(), width=120, no_color=True)
    draw(out, picture("batching"))
    assert isinstance(out.file, io.StringIO)
    said = out.file.getvalue()
    assert "▒ prefill" in said
    assert "█ decode" in said


def test_keys_and_values_overtake_the_weights_where_the_chart_says() -> None:
    chart = next(p for p in picture("kv-growth").parts if isinstance(p, Lines))
    (at, label), *_ = chart.marks
    kv, weights = chart.lines[0], chart.lines[3]
    assert label == "K and V overtake the weights"
    assert np.interp(at, kv.x, kv.y) == pytest.approx(weights.y[0], rel=0.01)
    assert not next(
        p for p in SIMULATIONS["kv-growth"].run(users=1, context=4096).parts if isinstance(p, Lines)
    ).marks


def test_a_longer_answer_is_more_of_the_time_in_decodes() -> None:
    lesson = SIMULATIONS["prefill-decode"]
    shares = [
        lesson.run(prompt=8192, output=n).fact("time of a request in decode steps of 1")
        for n in (2, 64, 2048)
    ]
    assert shares == sorted(shares)
    assert shares[0] < 10 < 90 < shares[-1]  # type: ignore[operator]


def test_the_acceptance_of_the_theory_can_be_chosen() -> None:
    given = SIMULATIONS["speculation"].run(tokens=8, alpha=0.8, drafts=8)
    assert given.fact("by theory at α = 0.8") == pytest.approx((1 - 0.8**9) / 0.2)
    assert fact("speculation", "drafts per round with the best speed-up") >= 1


def test_without_a_cache_positions_grow_with_the_square() -> None:
    lesson = SIMULATIONS["no-kv-cache"]
    few, many = (lesson.run(prompt=16, output=n) for n in (256, 512))
    positions = "positions computed, without against with"
    # T outputs behind a prompt of P: P + Σ (P + t) against P + T.
    assert many.fact(positions) == pytest.approx((16 + sum(16 + t for t in range(1, 512))) / (16 + 511))
    assert many.fact(positions) / few.fact(positions) == pytest.approx(2.0, rel=0.05)  # type: ignore[operator]
    assert fact("no-kv-cache", "time, without against with") > 1.5


def test_a_server_is_faster_than_a_loop_around_generate() -> None:
    assert fact("generate-loop", "served against one at a time") > 3
    assert fact("generate-loop", "served against batches of 4") > 1.5
    padded = SIMULATIONS["generate-loop"].run(prompts="100,300", lengths="10,30", batch=2)
    assert padded.fact("prompt tokens that the batches pad") == pytest.approx(100 / 3)
    assert padded.fact("decode steps of the batches") == pytest.approx(100 / 3)
    equal = SIMULATIONS["generate-loop"].run(prompts="100", lengths="20,20,20,20", batch=4)
    assert equal.fact("served against batches of 4") == pytest.approx(1.0, abs=0.15)


def test_the_first_rule_that_holds_ends_the_answer() -> None:
    lesson = SIMULATIONS["stop-rules"]
    for controls, first, reason in (
        ({"stop": "", "end_of_text": "off", "max_tokens": 12}, "max_tokens", "length"),
        ({"stop": "light", "end_of_text": "off"}, "stop string", "stop"),
        ({"stop": "", "stop_token": ".", "end_of_text": "off"}, "stop token", "stop"),
    ):
        shown = lesson.run(**controls)
        assert shown.fact("the rule that ends first") == first
        assert shown.fact("finish_reason") == reason
        table = next(p for p in shown.parts if isinstance(p, Table))
        assert table.rows[-1][1] == min(row[1] for row in table.rows[:-1])


def test_the_parts_of_a_request_make_its_whole_life() -> None:
    parts = next(p for p in picture("request-lifecycle").parts if isinstance(p, Table))
    e2el = next(
        f.value
        for p in picture("request-lifecycle").parts
        for f in getattr(p, "facts", ())
        if f.text == "E2EL"
    )
    assert sum(row[2] for row in parts.rows) == pytest.approx(e2el)
    assert [row[0] for row in parts.rows][-1] == "decode"


def test_latency_metrics_obey_their_definitions() -> None:
    assert fact("latency-metrics", "one request: TTFT") == pytest.approx(fact("latency-metrics", "its E2EL"))
    assert fact("latency-metrics", "goodput") <= fact("latency-metrics", "requests/s completed")


def test_prefill_is_bound_by_arithmetic_and_decode_by_memory() -> None:
    assert fact("prefill-decode", "arithmetic used by the prefill") > 90
    assert fact("prefill-decode", "arithmetic used by a decode of 1") < 1


def test_throughput_rises_and_tpot_with_it() -> None:
    lines = [p for p in picture("throughput-latency").parts if isinstance(p, Lines)]
    tokens, tpot = lines[0].lines[0].y, lines[1].lines[0].y
    assert list(tokens) == sorted(tokens)
    assert list(tpot) == sorted(tpot)
    assert lines[0].zone is not None


def test_paging_wastes_below_4_percent_where_ranges_waste_60_to_85() -> None:
    assert 60 <= fact("paged-attention", "waste of contiguous") <= 85
    assert fact("paged-attention", "waste of blocks") < 4
    assert fact("paged-attention", "speed of paged") > 1.5


def test_both_memories_hold_every_token_once() -> None:
    lengths = [(30, 20), (5, 2), (64, 40), (17, 33), (100, 3)]
    pages, ranges = paged(lengths, 256, 16, 160), contiguous(lengths, 320, 160)
    for run in (pages, ranges):
        assert all(s.num_used <= s.num_reserved for s in run.snapshots)
    for snapshot in pages.snapshots:
        blocks = [block for held in snapshot.held.values() for block in held]
        assert len(blocks) == len(set(blocks))
        assert all(len(snapshot.held[r]) == -(-n // 16) for r, n in snapshot.used.items())
    # A request is in as many steps as it has output tokens.
    assert sum(len(s.used) for s in ranges.snapshots) == sum(output for _, output in lengths)
    assert sum(len(s.used) for s in pages.snapshots) == sum(output for _, output in lengths)


def test_free_ranges_that_touch_become_one() -> None:
    pool = ContiguousPool(100)
    assert all(pool.reserve(owner, 30) for owner in range(3))
    assert not pool.reserve(3, 30)
    pool.release(0)
    pool.release(2)
    assert pool.num_free == 70
    assert not pool.reserve(3, 45), "70 are free, in ranges of 30 and 40"
    pool.release(1)
    assert pool.free == [(0, 100)]


def test_tiles_give_the_attention_of_the_whole_matrix() -> None:
    for rows, columns in ((1, 1), (16, 32), (40, 7), (96, 96)):
        error, counted = check(rows, columns, 64)
        assert error < 1e-12
        assert counted.written == 96 * 64
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 128, 32))
    counted = Tiled(q, k, v)
    counted.run(32, 64)
    assert 2 * (counted.read + counted.written) == attention_traffic(128, 1, 1, 32, 2, tile=32).tiled


def test_the_decode_loop_is_that_of_the_engine() -> None:
    sampling = SamplingParams(max_tokens=6, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
    text, steps = decode("It was a dark and", sampling)
    plain = engine("").generate(["It was a dark and"], sampling, use_tqdm=False)[0].outputs[0]
    assert text == plain.text
    assert [s.token_id for s in steps] == list(plain.token_ids)
    for step in steps:
        assert float(step.model.sum()) == pytest.approx(1.0)
        assert float(step.kept[step.token_id]) >= float(step.warm[step.token_id]) > 0
        assert 0.9 <= float(step.warm[step.kept > 0].sum()) <= 1.0
    _, greedy = decode("It was a dark and", SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    assert all(float(s.kept[s.token_id]) == 1.0 for s in greedy)
    assert len(DECODE_LOOP.run(tokens=3, step=50).parts) == 4


@pytest.mark.parametrize("draft", ["quill-draft", "ngram"])
def test_rounds_of_speculation_make_the_plain_text(draft: str) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    text, rounds = speculate("the man and the man and the", sampling, draft, 3)
    plain = engine("").generate(["the man and the man and the"], sampling, use_tqdm=False)[0].outputs[0]
    assert text == plain.text
    assert sum(1 + r.num_accepted for r in rounds) == 24
    assert all(r.num_accepted <= len(r.drafts) <= 3 for r in rounds)
    assert any(r.drafts for r in rounds)


def test_tensor_parallel_shares_add_up() -> None:
    bars = next(p for p in picture("parallelism").parts if isinstance(p, Bars))
    weights = dict(zip(bars.names, bars.bars[""], strict=True))
    assert weights["TP8"] * 8 == pytest.approx(weights["DP8"], rel=0.001)
    ranks = next(p for p in picture("parallelism").parts if isinstance(p, Grid))
    assert all(len(row) == 8 for row in ranks.rows)


def test_a_cached_prefix_leaves_what_is_new() -> None:
    assert fact("prefix-cache", "of the last request") == pytest.approx(100 * 2000 / 2080)
    assert fact("prefix-cache", "mean TTFT, without against with") > 2


def test_separate_pools_do_not_interrupt_decodes() -> None:
    longest = [fact("disaggregation", f"longest gap behind the second token, {how}") for how in
               ("colocated", "disaggregated")]  # fmt: skip
    assert longest[1] < 0.5 * longest[0]
    assert len([p for p in picture("disaggregation").parts if isinstance(p, Timeline)]) == 2


def test_the_server_reacts_to_its_controls() -> None:
    server = SIMULATIONS["production-server"]
    off = server.run(cache="off")
    assert off.fact("prompt tokens from the cache") == 0
    assert fact("production-server", "prompt tokens from the cache") > 50
    assert "does not fit" in str(server.run(model="llama-2-70b").as_dict())
    with pytest.raises(ConfigError, match="slo"):
        server.run(slo="ttft=1")

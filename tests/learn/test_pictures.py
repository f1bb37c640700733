"""What the simulations show agrees with the engine: sums, laws, and the same text without the simulation."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.learn.allocation import contiguous, paged
from quire.learn.contiguous import ContiguousPool
from quire.learn.decode_loop import SIMULATION as DECODE_LOOP
from quire.learn.flash_attention import Tiled, check
from quire.learn.picture import Bars, Grid, Lines, Picture, Table, Timeline
from quire.learn.quill import decode, engine, speculate
from quire.learn.registry import SIMULATIONS
from quire.plan.laws import attention_traffic
from quire.request import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
SIXTEEN = {
    "request-lifecycle", "decode-loop", "prefill-decode", "kv-growth", "memory-hierarchy", "latency-metrics",
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


def test_there_are_sixteen_and_the_page_names_them() -> None:
    assert set(SIMULATIONS) == SIXTEEN
    page = (ROOT / "docs" / "learn.md").read_text()
    assert all(f"`{name}`" in page for name in SIXTEEN)


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

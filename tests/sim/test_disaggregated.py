"""Pools for prefill and decode: what travels, what it costs, what it wins, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from quire.errors import ConfigError
from quire.executor.base import Executor
from quire_lab.bench.args import ServeBenchArgs, SimulateArgs
from quire_lab.learn.engine import StepWatch
from quire_lab.sim.run import Simulated, simulate
from quire_lab.sim.setup import set_up
from quire_lab.workload.build import Synthetic
from quire_lab.workload.distributions import Arrivals, Fixed

WORK = Synthetic(40, Fixed(1000), Fixed(50), Arrivals(12.0)).build(0)
TOKEN_BYTES = 131072  # Llama 3.1 8B: 2 · 32 layers · 8 heads · 128 · 2 bytes


def ran(watches: list[StepWatch] | None = None, **flags: Any) -> Simulated:
    args = SimulateArgs(hardware="h100", model="llama-3.1-8b", **flags)
    setup = set_up(args, ServeBenchArgs(), {})

    def wrap(executor: Executor) -> Executor:
        assert watches is not None
        watches.append(StepWatch(executor))
        return watches[-1]

    return simulate(setup.config, setup.step_time, WORK, watch=wrap if watches is not None else None)


def test_each_prompt_travels_once_as_whole_blocks() -> None:
    watches: list[StepWatch] = []
    result = ran(watches, disaggregate="1:2")
    assert [r.num_output_tokens for r in result.records] == [50] * 40
    assert result.transferred is not None
    assert result.transferred.num_transfers == 40
    assert result.transferred.num_bytes == 40 * (1000 // 16) * 16 * TOKEN_BYTES
    assert all(r.num_cached_tokens == 0 for r in result.records), "blocks that travelled are no cache hits"
    prefill, *decode = watches
    assert all(row.start == 0 or row.count > 1 for step in prefill.steps for row in step.rows)
    # The last partial block and the first token are computed again, and then one token per step.
    assert max(row.count for one in decode for step in one.steps for row in step.rows) == 1000 % 16 + 1


def test_decodes_are_not_interrupted_by_prompts() -> None:
    colocated, apart = ran(replicas=3), ran(disaggregate="1:2")
    longest = [max(gap_s for r in result.records for gap_s in r.itl_s[1:]) for result in (colocated, apart)]
    assert longest[1] < 0.5 * longest[0], "behind the second token, which waits for the blocks"
    assert ran(disaggregate="1:2").records == apart.records


def test_a_slow_link_delays_the_second_token_alone() -> None:
    fast, slow = ran(disaggregate="1:2"), ran(disaggregate="1:2", link_gb_s=1.0)
    assert [r.ttft_s for r in fast.records] == [r.ttft_s for r in slow.records]
    assert fast.transferred is not None
    assert slow.transferred is not None
    assert slow.transferred.move_s == pytest.approx(50 * fast.transferred.move_s)
    assert slow.transferred.wait_s > fast.transferred.wait_s
    assert slow.records[-1].itl_s[0] > fast.records[-1].itl_s[0] + 0.1


def test_a_prompt_below_a_block_is_computed_by_both_pools() -> None:
    args = SimulateArgs(hardware="h100", model="llama-3.1-8b", disaggregate="1:1")
    setup = set_up(args, ServeBenchArgs(), {})
    short = Synthetic(3, Fixed(5), Fixed(4), Arrivals()).build(0)
    result = simulate(setup.config, setup.step_time, short)
    assert [r.num_output_tokens for r in result.records] == [4] * 3
    assert result.transferred is not None
    assert result.transferred.num_transfers == 0


@pytest.mark.parametrize(
    ("flags", "settings", "named"),
    [
        ({"disaggregate": "2"}, {}, "P:D"),
        ({"disaggregate": "0:2"}, {}, "P:D"),
        ({"disaggregate": "1:2", "replicas": 3}, {}, "replicas = 3"),
        ({"link_gb_s": 3.0}, {}, "link_gb_s"),
        ({"disaggregate": "1:2"}, {"enable_prefix_caching": False}, "prefix cache"),
    ],
)
def test_wrong_flags_are_named(flags: dict[str, Any], settings: dict[str, Any], named: str) -> None:
    args = SimulateArgs(hardware="h100", model="llama-3.1-8b", **flags)
    with pytest.raises(ConfigError, match=named):
        set_up(args, ServeBenchArgs(), settings)

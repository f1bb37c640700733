"""Admission, sharing, forks, windows and what steps in flight hold."""

from __future__ import annotations

import pytest
from tests.cache.cache_bench import NO, Bench

from quire.cache.blocks import BlockTable, Windows

PROMPT = tuple(range(10))  # two full blocks of 4 and a half


def test_a_second_request_shares_the_full_blocks() -> None:
    bench = Bench()
    first, cached = bench.run(PROMPT)
    assert cached == 0
    second, cached = bench.run(PROMPT)
    assert cached == 8
    assert second.rows[0][:2] == first.rows[0][:2]
    assert second.rows[0][2] != first.rows[0][2]


def test_requests_of_the_same_step_share() -> None:
    bench = Bench()
    with bench.step():
        first = bench.admit(PROMPT)
        second = bench.admit(PROMPT)
    assert first is not None
    assert second is not None
    assert (first[1], second[1]) == (0, 8)
    assert second[0].reads == {0}


def test_salts_do_not_share() -> None:
    bench = Bench()
    bench.run(PROMPT, salt="a")
    assert bench.run(PROMPT, salt="b")[1] == 0
    assert bench.run(PROMPT, salt="a")[1] == 8


def test_without_caching_nothing_is_published() -> None:
    bench = Bench(caching=False)
    bench.run(PROMPT)
    assert bench.run(PROMPT)[1] == 0
    assert bench.cache.prefix.num_blocks == 0


def test_a_full_hit_leaves_the_last_token_to_a_copied_tail() -> None:
    bench = Bench()
    prompt = tuple(range(8))
    first, _ = bench.run(prompt)
    with bench.step() as step:
        admitted = bench.admit(prompt)
        assert admitted is not None
        second, cached = admitted
        assert cached == 7
        assert second.rows[0][0] == first.rows[0][0]
        assert [tuple(m) for m in step.moves] == [(first.rows[0][1], second.rows[0][1])]
    bench.apply()
    bench.cache.settle(second, prompt, 8)
    bench.check()
    assert second.rows == first.rows, "once computed, the copy is exchanged for the published block"
    assert second.take_unsent() == ((1,), ((first.rows[0][1],),))


def test_a_full_hit_within_the_step_that_computes_it_is_not_copied() -> None:
    """Moves take effect before the forward pass: the source would not be written yet."""
    bench = Bench()
    with bench.step() as step:
        bench.admit(tuple(range(8)))
        admitted = bench.admit(tuple(range(8)))
        assert admitted is not None
        assert admitted[1] == 4
        assert not step.moves


def test_a_full_hit_without_room_for_a_copy_computes_its_tail() -> None:
    bench = Bench(num_blocks=2)
    prompt = tuple(range(8))
    first, _ = bench.run(prompt)
    bench.release(first)
    _, cached = bench.run(prompt)
    assert cached == 4


def test_a_fork_shares_full_blocks_and_copies_the_tail() -> None:
    bench = Bench()
    source, _ = bench.run(PROMPT)
    target = bench.cache.new_table()
    bench.tables.append(target)
    with bench.step() as step:
        assert bench.cache.fork(source, target, 9)
        assert target.rows[0][:2] == source.rows[0][:2]
        assert [tuple(m) for m in step.moves] == [(source.rows[0][2], target.rows[0][2])]
        assert target.reads == {1}
    bench.release(source)
    bench.release(target)
    assert bench.cache.pool.num_free == 16 - 4, "two cached, and the move in flight holds both its ends"
    bench.apply()
    assert bench.cache.pool.num_free == 16 - 2


def test_a_fork_at_a_block_edge_needs_no_move() -> None:
    bench = Bench()
    source, _ = bench.run(tuple(range(9)))
    target = bench.cache.new_table()
    bench.tables.append(target)
    with bench.step() as step:
        assert bench.cache.fork(source, target, 8)
        assert not step.moves
    assert target.rows[0] == source.rows[0][:2]


def test_a_fork_that_finds_no_block_changes_nothing() -> None:
    bench = Bench(num_blocks=3)
    source, _ = bench.run(PROMPT)
    target = bench.cache.new_table()
    bench.tables.append(target)
    with bench.step():
        assert not bench.cache.fork(source, target, 9)
    assert target.num_rows == 0


def test_blocks_of_a_table_in_flight_go_when_its_last_step_is_applied() -> None:
    bench = Bench(caching=False)
    table, _ = bench.run(PROMPT)
    for _ in range(2):
        with bench.step():
            table.last_step = bench.next_step - 1
    bench.release(table)
    assert bench.cache.pool.num_free == 13
    assert bench.cache.references.num_coming == 3
    bench.apply()
    assert bench.cache.pool.num_free == 13
    bench.apply()
    assert bench.cache.pool.num_free == 16


def test_admission_needs_room_for_all_known_tokens() -> None:
    bench = Bench(num_blocks=4)
    bench.run(PROMPT)
    with bench.step():
        assert bench.admit(tuple(range(50, 60)), budget=1) is None
        assert bench.admit(tuple(range(50, 53)), budget=1) is not None


def test_idle_blocks_are_evicted_for_a_newcomer() -> None:
    bench = Bench(num_blocks=4)
    table, _ = bench.run(PROMPT)
    bench.release(table)
    assert bench.cache.references.num_available == 4
    bench.run(tuple(range(50, 66)))
    assert bench.cache.prefix.num_evicted == 2


def test_a_sliding_group_gives_up_what_no_query_sees() -> None:
    bench = Bench(windows=(None, 5))
    table, _ = bench.run(tuple(range(20)))
    # The next query is at 20 and sees 16…20: rows 4 on.
    assert table.rows[1][:4] == [NO] * 4
    assert table.rows[1][4] != NO
    assert NO not in table.rows[0]


def test_a_sliding_hit_needs_the_last_window_only() -> None:
    bench = Bench(num_blocks=64, windows=(None, 5))
    bench.run(tuple(range(20)))
    table, cached = bench.run((*range(20), 99))
    assert cached == 20
    assert table.rows[1][:4] == [NO] * 4


def test_a_hit_whose_window_is_gone_is_shorter() -> None:
    bench = Bench(num_blocks=12, windows=(None, 5))
    first, _ = bench.run(tuple(range(20)))
    bench.release(first)
    # Ten blocks are cached, two free: the newcomer takes leaves from the end, then sliding blocks inside.
    other, _ = bench.run(tuple(range(50, 70)))
    bench.release(other)
    _, cached = bench.run((*range(20), 99))
    assert cached < 20


def test_withdrawal_takes_the_readers_along() -> None:
    bench = Bench()
    with bench.step():
        first = bench.admit(PROMPT)
        second = bench.admit((*PROMPT, 10, 11, 12, 13))
    assert first is not None
    assert second is not None
    assert bench.cache.publisher.withdraw([first[0]], 0) == {0}
    assert second[0].reads == {0}
    assert not bench.cache.prefix.nodes, "what lies below a withdrawn block goes too"
    bench.check()
    assert first[0].tip is not None
    assert not first[0].tip.alive
    bench.cache.publisher.publish(first[0], (*PROMPT, 10, 11), 12, planned=False)
    assert not first[0].publishable, "nothing is published below a block that was withdrawn"


def test_an_exchange_for_a_block_in_flight_is_a_read() -> None:
    """A conversation's next turn may publish, as prompt, what its last turn is still generating."""
    bench = Bench()
    first, _ = bench.run((1, 2, 3))
    with bench.step():
        first.last_step = bench.next_step - 1
    with bench.step():
        second = bench.admit((1, 2, 3, 4, 5))
    assert second is not None
    bench.apply()
    bench.cache.settle(first, [1, 2, 3, 4], 4)
    bench.check()
    assert first.rows[0][0] == second[0].rows[0][0]
    assert first.reads == {2}


@pytest.mark.parametrize("window", [1, 4, 5, 16, 17])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_lifetime_of_a_window_is_what_sliding_leaves(window: int, block_size: int) -> None:
    """The number that refuses requests equals the most blocks that decoding one by one ever holds."""
    windows = Windows((window,), block_size)
    most = 0
    for position in range(200):
        first = windows.first_rows(position)[0]
        most = max(most, position // block_size + 1 - first)
    assert windows.lifetime_blocks(200, chunk=1) == most


def test_a_table_sends_only_what_is_new() -> None:
    bench = Bench()
    table = bench.cache.new_table()
    bench.tables.append(table)
    with bench.step():
        assert bench.cache.allocate(table, 5)
        assert table.take_unsent() == ((0,), ((0, 1),))
        assert table.take_unsent() == ((), ())
        assert bench.cache.allocate(table, 9)
        assert table.take_unsent() == ((2,), ((2,),))
        assert bench.cache.reachable_end(table) == 64


def test_the_first_rows_sent_are_those_held() -> None:
    table = BlockTable(2, b"r" * 32, 4)
    table.rows = [[5, 6, 7], [NO, NO, 8]]
    table.first_rows = [0, 2]
    assert table.take_unsent() == ((0, 2), ((5, 6, 7), (8,)))


@pytest.mark.parametrize("windows", [(None, 5), (3, 17), (None, 1), (16,)])
def test_a_row_goes_at_the_first_position_that_does_not_see_it(windows: tuple[int | None, ...]) -> None:
    rule = Windows(windows, 4)
    before = rule.first_rows(0)
    for position in range(1, 100):
        rows = rule.first_rows(position)
        if rows != before:
            assert rule.next_slide(before) == position
        before = rows

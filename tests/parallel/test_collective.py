"""The collectives of real processes against their contracts, in shared memory and over Gloo."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.parallel.ranks import LIMIT_S, Helpers

from quire.errors import ConfigError, StepError
from quire.kernels.collective import Group, reference
from quire.kernels.collective.distributed import TorchGroup
from quire.kernels.collective.native import attach
from quire.kernels.registry import native
from quire.kernels.tape import StepTape
from quire.kernels.threads import choose_threads
from quire.parallel.segment import Lanes, Segment, remove, segment_bytes
from quire.parallel.topology import Topology

pytestmark = pytest.mark.skipif(native is None, reason="the native extension is not built")
SLOT = 1 << 14  # small, so that messages go in pieces
SHAPES = [(1, 96), (5, 6), (37, 192), (300, 48)]  # divisible by 2 and 3


def rows_of(rank: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + shape[0])
    wide = torch.randn(shape[0], shape[1] + 5, generator=generator).to(dtype)
    return wide[:, : shape[1]]  # strided


def all_ops(group: Group) -> list[torch.Tensor]:
    """Return the results of every op, shape and type, in one order."""
    found = []
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            x = rows_of(group.index, shape, dtype)
            found += [group.all_reduce(x, torch.float32), group.all_reduce(x, torch.bfloat16)]
            found += [group.all_gather(x), group.reduce_scatter(x, dtype)]
            found.append(group.all_gather(x[:, : width_of(group.index, shape)], begins_of(group.size, shape)))
            found.append(group.all_to_all(x))
            found.append(parts_of(group, shape, dtype))
            found += [group.all_reduce(x.contiguous(), out) for out in (torch.bfloat16, torch.float32) * 2]
    return found


def count_of(rank: int, shape: tuple[int, int]) -> int:
    """Rows of a member where these have different numbers; the first one has none."""
    return shape[0] * rank // 3


def width_of(rank: int, shape: tuple[int, int]) -> int:
    """Columns of a member where these have different numbers."""
    return shape[1] - 2 * rank


def begins_of(size: int, shape: tuple[int, int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate((width_of(rank, shape) for rank in range(size)), initial=0))


def parts_of(group: Group, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    begins = [0, *itertools.accumulate(count_of(rank, shape) for rank in range(group.size))]
    y = torch.full((begins[-1], shape[1]), -1.0, dtype=dtype)
    start, stop = begins[group.index], begins[group.index + 1]
    y[start:stop] = rows_of(group.index, shape, dtype)[: stop - start]
    group.gather_parts(y, begins)
    return y


def pass_on(group: Group) -> bool:
    """Send rows from member to member, several messages ahead of the receiver."""
    cases = [(shape, dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)]
    right = True
    for shape, dtype in cases:
        if group.index > 0:
            right &= torch.equal(group.recv(*shape, dtype), rows_of(group.index - 1, shape, dtype))
        if group.index + 1 < group.size:
            group.send(rows_of(group.index, shape, dtype))
    return right


def expected_of(rank: int, size: int) -> list[torch.Tensor]:
    found = []
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            rows = [rows_of(each, shape, dtype) for each in range(size)]
            found += [reference.all_reduce(rows, torch.float32), reference.all_reduce(rows, torch.bfloat16)]
            found += [
                reference.all_gather(rows),
                reference.reduce_scatter(rows, rank, dtype),
                reference.all_gather([each[:, : width_of(r, shape)] for r, each in enumerate(rows)]),
            ]
            found.append(reference.all_to_all(rows, rank))
            found.append(reference.gather_parts([each[: count_of(r, shape)] for r, each in enumerate(rows)]))
            found += [reference.all_reduce(rows, out) for out in (torch.bfloat16, torch.float32) * 2]
    return found


def shared(name: str, topology: Topology, rank: int, num_threads: int, limit_s: float = LIMIT_S) -> Group:
    choose_threads(num_threads, torch_is_heavy=False)
    group = attach(Segment.attach(name, topology), rank, limit_s).group("pp")
    assert group is not None
    return group


def run_shared(name: str, topology: Topology, num_threads: int, rank: int) -> bool:
    found = all_ops(shared(name, topology, rank, num_threads))
    return same(found, expected_of(rank, topology.pp))


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


@pytest.fixture
def segment(request: pytest.FixtureRequest) -> Iterator[Segment]:
    """A segment whose groups are along pp, the axis with one-way messages."""
    size = getattr(request, "param", 2)
    made = Segment.create(f"quire-test-{os.getpid()}-collective", Topology(pp=size), SLOT)
    yield made
    remove(made.name)


def everywhere(helpers: Helpers, size: int, function: Callable[[int], Any]) -> list[Any]:
    """Return what ``function(rank)`` gives in ``size`` processes."""
    connections = helpers.connections(size)
    for rank, connection in enumerate(connections):
        connection.send((function, rank))
    return [helpers.answer(connection) for connection in connections]


@pytest.mark.parametrize("segment", [2, 3], indirect=True)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_shared_memory_keeps_the_contracts(helpers: Helpers, segment: Segment, num_threads: int) -> None:
    topology = segment.topology
    found = everywhere(helpers, topology.pp, partial(run_shared, segment.name, topology, num_threads))
    assert all(found)


def run_one_way(name: str, topology: Topology, rank: int) -> bool:
    return pass_on(shared(name, topology, rank, 1))


@pytest.mark.parametrize("segment", [3], indirect=True)
def test_rows_go_from_member_to_member(helpers: Helpers, segment: Segment) -> None:
    assert all(everywhere(helpers, 3, partial(run_one_way, segment.name, segment.topology)))


def run_gloo(file: str, size: int, rank: int) -> bool:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=size)
    try:
        group = TorchGroup()
        return same(all_ops(group), expected_of(rank, size)) and pass_on(group)
    finally:
        dist.destroy_process_group()


def test_gloo_keeps_the_contracts(helpers: Helpers, tmp_path: Path) -> None:
    """Of three members, since a sum of two has the same bits in either order."""
    assert all(everywhere(helpers, 3, partial(run_gloo, str(tmp_path / "meet"), 3)))


def run_taped(name: str, topology: Topology, rank: int) -> bool:
    """Record a step with a collective in the middle, and replay it with other numbers of rows."""
    group = shared(name, topology, rank, 1)
    x = torch.zeros(64, 48)
    tape = StepTape(lambda: group.all_reduce(x, torch.bfloat16), 64, 8)
    for num_tokens in (64, 1, 0, 17):
        for each in range(topology.pp):
            torch.manual_seed(each)
            mine = torch.randn(64, 48)
            if each == rank:
                x.copy_(mine)
        tape.run(num_tokens, 0)
        rows = [
            torch.randn(64, 48, generator=torch.Generator().manual_seed(each)) for each in range(topology.pp)
        ]
        expected = reference.all_reduce(rows, torch.bfloat16)
        if not torch.equal(tape.output[:num_tokens], expected[:num_tokens]):
            return False
    return len(tape) == 1


def test_a_recorded_step_replays_its_collectives(helpers: Helpers, segment: Segment) -> None:
    assert all(everywhere(helpers, 2, partial(run_taped, segment.name, segment.topology)))


def wait_alone(name: str, topology: Topology, limit_s: float, rank: int) -> tuple[str, float]:
    group = shared(name, topology, rank, 1, limit_s)
    start = time.monotonic()
    try:
        group.all_reduce(torch.ones(1, 8), torch.float32)
    except RuntimeError as error:
        return str(error), time.process_time()
    return "", time.monotonic() - start


def test_an_abort_ends_every_wait(helpers: Helpers, segment: Segment) -> None:
    connection = helpers.connections(1)[0]
    connection.send((partial(wait_alone, segment.name, segment.topology, LIMIT_S), 0))
    assert not connection.poll(0.2)
    segment.abort()
    text, _ = helpers.answer(connection)
    assert "aborted while a collective waited for rank 1" in text


def test_a_late_rank_fails_the_step_by_name(helpers: Helpers, segment: Segment) -> None:
    connection = helpers.connections(1)[0]
    connection.send((partial(wait_alone, segment.name, segment.topology, 0.3), 0))
    text, _ = helpers.answer(connection)
    assert "rank 1 did not reach a collective within 0.3" in text
    assert segment.aborted


def cpu_of_wait(name: str, topology: Topology, rank: int) -> float:
    before = time.process_time()
    wait_alone(name, topology, 1.0, rank)
    return time.process_time() - before


def test_a_wait_does_not_burn_a_core(helpers: Helpers, segment: Segment) -> None:
    connection = helpers.connections(1)[0]
    connection.send((partial(cpu_of_wait, segment.name, segment.topology), 0))
    assert helpers.answer(connection) < 0.5  # of 1 s


def test_a_segment_is_checked_before_it_is_used(segment: Segment) -> None:
    with pytest.raises(StepError, match="is of another group"):
        Segment.attach(segment.name, Topology(tp=2))
    with pytest.raises(StepError, match="cannot be opened"):
        Segment.attach(segment.name + "-gone", segment.topology)
    with pytest.raises(ConfigError, match="cannot be created"):
        Segment.create(segment.name, segment.topology)


def test_too_little_shared_memory_leaves_nothing_behind() -> None:
    name = f"quire-test-{os.getpid()}-large"
    with pytest.raises(ConfigError, match=r"/dev/shm has too little room: .* needs \d+ MiB"):
        Segment.create(name, Topology(tp=2), 1 << 42)
    assert not Path("/dev/shm", name).exists()


def test_a_row_larger_than_a_slot_is_refused(segment: Segment) -> None:
    group = attach(segment, 0).group("pp")
    assert group is not None
    with pytest.raises(ValueError, match="larger than a slot"):
        group.all_reduce(torch.zeros(1, SLOT), torch.float32)


def test_lanes_and_slots_do_not_overlap() -> None:
    topology = Topology(2, 2)
    spans = set()
    for rank in range(topology.world_size):
        for axis in ("tp", "pp"):
            lanes = Lanes.of_rank(topology, rank, axis, SLOT)  # type: ignore[arg-type]
            spans |= {(at, at + native.LANE_BYTES) for at in lanes.lanes}
            spans |= {(at, at + 2 * SLOT) for at in lanes.slots}
    ordered = sorted(spans)
    assert len(ordered) == 2 * 2 * topology.world_size
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))
    assert ordered[-1][1] == segment_bytes(topology, SLOT)

"""Groups whose ranks are on several nodes: Gloo between two processes on the loopback device, and who is where."""

from __future__ import annotations

import socket
from functools import partial

import pytest
import torch
from tests.gateway.services import free_port
from tests.parallel.ranks import Helpers
from tests.parallel.test_collective import all_ops, everywhere, expected_of, pass_on, same

from quire.errors import ConfigError, EngineDeadError
from quire.kernels.collective import Group, reference
from quire.kernels.collective.distributed import connect
from quire.kernels.pointwise import scale_rows
from quire.kernels.registry import backends
from quire.kernels.tape import NotRecordable, StepTape
from quire.parallel.placement import Meeting, place
from quire.parallel.topology import Topology

TWO = Topology(tp=2)


@pytest.fixture
def port() -> int:
    return free_port()


def met(port: int, rank: int, limit_s: float = 60.0) -> Group:
    """Meet on the loopback device; rank 0 listens at ``port``."""
    listener = socket.create_server(("127.0.0.1", port)) if rank == 0 else None
    meeting = Meeting("127.0.0.1", port, "127.0.0.1", ("tp",))
    return connect(meeting, TWO, rank, listener, limit_s)["tp"]


def run_contracts(port: int, rank: int) -> bool:
    group = met(port, rank)
    return same(all_ops(group), expected_of(rank, 2)) and pass_on(group)


def test_ranks_that_meet_at_an_address_keep_the_contracts(helpers: Helpers, port: int) -> None:
    assert all(everywhere(helpers, 2, partial(run_contracts, port)))


def rows_of(rank: int) -> torch.Tensor:
    return torch.randn(64, 48, generator=torch.Generator().manual_seed(rank)).bfloat16()


def run_taped(port: int, rank: int) -> bool:
    """Record native calls around two sums, and replay them with other numbers of rows."""
    group = met(port, rank)
    x = torch.zeros(64, 48, dtype=torch.bfloat16)
    scale = scale_rows.on(next(each for each in backends("scale_rows") if each != "reference"))

    def forward() -> torch.Tensor:
        total = group.all_reduce(scale(x, 2.0), torch.bfloat16)
        return group.all_gather(scale(total, 0.5)[:, 8:])

    tape = StepTape(forward, 64, 8)
    x.copy_(rows_of(rank))
    total = reference.all_reduce([rows_of(each) * 2 for each in range(2)], torch.bfloat16) * 0.5
    expected = reference.all_gather([total[:, 8:]] * 2)
    for num_tokens in (64, 1, 0, 17):
        tape.run(num_tokens, 0)
        if not torch.equal(tape.output[:num_tokens], expected[:num_tokens]):
            return False
    assert group.bytes_sent == 82 * 2 * (48 + 40)
    return len(tape) == 4 and tape.native is None and len(tape.run_calls(3, 0)) == 4


def test_a_collective_over_the_network_cuts_the_tape(helpers: Helpers, port: int) -> None:
    assert all(everywhere(helpers, 2, partial(run_taped, port)))


def run_other_rows(port: int, rank: int) -> str:
    group, x = met(port, rank), torch.zeros(5, 8)
    try:
        StepTape(lambda: group.all_reduce(x, torch.float32), 64, 8)
    except NotRecordable as reason:
        group.all_reduce(x, torch.float32)  # or one could go while the other still connects
        return str(reason)
    return ""


def test_a_collective_of_other_rows_is_not_recorded(helpers: Helpers, port: int) -> None:
    assert set(everywhere(helpers, 2, partial(run_other_rows, port))) == {
        "a collective has 5 rows, which no step has"
    }


def run_late(port: int, rank: int) -> str:
    group = met(port, rank, limit_s=20.0 if rank else 2.0)
    if rank:
        return ""
    try:
        group.all_reduce(torch.ones(1, 8), torch.float32)
    except EngineDeadError as error:
        return str(error)
    return "no error"


def test_a_member_that_is_late_or_gone_is_one_line(helpers: Helpers, port: int) -> None:
    text, _ = everywhere(helpers, 2, partial(run_late, port))
    assert text.startswith("An exchange over the network with tp ranks 0, 1 failed: ")
    assert "\n" not in text


def test_a_rank_that_never_comes_is_one_line(helpers: Helpers, port: int) -> None:
    with pytest.raises(EngineDeadError, match=rf"did not meet at 127\.0\.0\.1:{port} within 1 s"):
        met(port, 0, limit_s=1.0)


@pytest.mark.parametrize(
    ("topology", "nodes", "bundles", "crossing", "shares"),
    [
        (Topology(tp=2), None, 1, (), True),
        (Topology(tp=2), 1, 1, (), True),
        (Topology(tp=2), 2, 2, ("tp",), False),
        (Topology(tp=2, pp=2), 2, 2, (), True),
        (Topology(tp=2, pp=2), 4, 4, ("tp",), False),
        (Topology(tp=2, cp=2), 2, 2, ("cp",), True),
        (Topology(tp=4, cp=2), 4, 4, ("tp", "cp"), False),
        (Topology(ep=4), 2, 2, ("ep",), False),
        (Topology(pp=3), 2, 3, (), False),
    ],
)
def test_ranks_of_a_stage_share_as_few_nodes_as_asked(
    topology: Topology, nodes: int | None, bundles: int, crossing: tuple[str, ...], shares: bool
) -> None:
    found = place(topology, nodes)
    assert (found.num_bundles, found.crossing, found.shares_memory) == (bundles, crossing, shares)


@pytest.mark.parametrize(
    ("topology", "nodes", "message"),
    [
        (Topology(tp=2, pp=2), 3, r"nodes = 3: 2 stages do not divide over so many; 1, 2, 4 are"),
        (Topology(tp=3), 2, r"nodes = 2: .* 3 ranks per stage, which do not divide over 2 nodes; 1, 3 are"),
        (Topology(tp=2), 4, r"nodes = 4: .* 2 ranks per stage, which do not divide over 4 nodes; 1, 2 are"),
    ],
)
def test_nodes_that_do_not_divide_are_refused(topology: Topology, nodes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(topology, nodes)

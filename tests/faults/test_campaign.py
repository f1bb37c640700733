"""Each fault of the campaign, once, under eight streams that have to equal an undisturbed run (slow: all at length)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import pytest
from tests.faults.campaign import FAULTS, Row, one_round, undisturbed
from tests.faults.streams import KINDS, Ask, Outcome, mixed
from tests.faults.world import World, may_mount

# Of these the injection takes less than a second, and the server is the module's; the others are `slow`.
QUICK = ("kill-helper", "nan")
NUM_STREAMS = 8


class Calm:
    """A world, and the streams of an undisturbed run of it."""

    def __init__(self, world: World, asks: list[Ask]) -> None:
        self.world, self.asks = world, asks
        self.alone: tuple[list[Outcome], int] = asyncio.run(undisturbed(world, asks))

    def inject(self, name: str, times: int = 1) -> Row:
        """Inject a fault; nothing may be missing, left or different."""
        row = Row(name)

        async def rounds() -> None:
            for _ in range(times):
                await one_round(self.world, FAULTS[name], self.asks, self.alone, row)
            row.num_blocks = await self.world.num_blocks_held()

        asyncio.run(rounds())
        assert not row.wrong
        assert row.num_equal == row.num_streams == times * len(self.asks)
        assert (row.num_missing, row.num_blocks) == (0, 0)
        return row


@pytest.fixture(scope="module")
def calm() -> Iterator[Calm]:
    with World(7) as world:
        yield Calm(
            world,
            mixed(NUM_STREAMS, kinds=("plain", "n", "chat", "schema", "lora", "messages", "regex", "tools")),
        )


@pytest.mark.parametrize("name", QUICK)
def test_streams_equal_beside_a_fault(calm: Calm, name: str) -> None:
    calm.inject(name)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(set(FAULTS) - set(QUICK)))
def test_streams_equal_over_a_fault_at_length(name: str) -> None:
    fault = FAULTS[name]
    if fault.needs_mount and not may_mount():
        pytest.skip("this machine allows no mount namespace")
    if name == "clock" and shutil.which("cc") is None:
        pytest.skip("no C compiler for the library that shifts the clock")
    for engine in fault.engines:
        with World(3, engine, **fault.settings) as world:
            Calm(world, mixed(len(KINDS))).inject(name, min(2, fault.per_server))

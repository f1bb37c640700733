"""Several stores of one engine: each block comes from where it is quickest, or from where it still is."""

from __future__ import annotations

from collections.abc import Sequence

from tests.fakes.tiers import DictStore
from tests.tiers.blocks import BLOCK_BYTES, keys_of, read, write

from quire.clock import VirtualClock
from quire.engine.kv_tier import counts_by_tier
from quire.metrics.engine_stats import EngineStats
from quire.metrics.prometheus import Exposition
from quire.metrics.server import ServerMetrics
from quire.tiers.stack import TierStack
from quire.tiers.store import StoreCounts


class SlowStore(DictStore):
    """A store whose reads take time."""

    def __init__(self, name: str, clock: VirtualClock, block_s: float) -> None:
        super().__init__()
        self.name = name
        self.block_s = block_s
        self.asked: list[tuple[int, str]] = []  # blocks, giver
        self.gives = True
        self._clock = clock

    def read(self, keys: Sequence[bytes], into: Sequence[memoryview], giver: str = "") -> int:
        self.asked.append((len(keys), giver))
        self._clock.advance(self.block_s * len(keys))
        return super().read(keys, into) if self.gives else 0

    def counts(self) -> StoreCounts:
        return StoreCounts(blocks_read=len(self.asked), num_blocks=len(self.blocks))


def stack_of(clock: VirtualClock, *block_s: float) -> tuple[TierStack, list[SlowStore]]:
    stores = [SlowStore(name, clock, each) for name, each in zip(("peers", "disk"), block_s, strict=True)]
    return TierStack(stores, clock), stores


def test_blocks_are_read_where_they_are(clock: VirtualClock) -> None:
    stack, (peers, disk) = stack_of(clock, 0.1, 0.2)
    keys = keys_of(12)
    write(peers, keys[:5])
    write(disk, keys[3:9])
    assert stack.contains(keys) == read(stack, keys) == 9
    assert stack.kept(keys) == 0
    assert write(stack, keys) == stack.kept(keys) == 12, "all stores have them now"
    assert stack.name == "peers+disk"


def test_the_quicker_store_is_asked_and_the_other_tried_again(clock: VirtualClock) -> None:
    stack, (peers, disk) = stack_of(clock, 0.2, 0.1)
    keys = keys_of(4)
    write(stack, keys)
    for _ in range(3):
        read(stack, keys)
    assert (len(peers.asked), len(disk.asked)) == (1, 2)
    peers.block_s = 0.01
    for _ in range(60):
        read(stack, keys)
    assert len(peers.asked) > 20, "it has become the quicker one"


def test_a_store_that_does_not_give_leaves_blocks_to_the_next(clock: VirtualClock) -> None:
    stack, (peers, disk) = stack_of(clock, 0.1, 0.2)
    keys = keys_of(6)
    write(stack, keys)
    peers.gives = False
    assert read(stack, keys) == 6
    disk.gives = False
    assert read(stack, keys) == 0


def test_a_quicker_store_takes_over_where_its_blocks_begin(clock: VirtualClock) -> None:
    stack, (peers, disk) = stack_of(clock, 0.1, 0.2)
    keys = keys_of(10)
    write(disk, keys)
    assert read(stack, keys[:2]) == 2
    write(peers, keys[4:])
    assert read(stack, keys[4:6]) == 2
    disk.asked.clear()
    peers.asked.clear()
    assert read(stack, keys) == 10
    assert (disk.asked, peers.asked) == ([(4, "")], [(6, "")])


def test_a_peer_is_waited_for_with_what_is_nowhere(clock: VirtualClock) -> None:
    stack, (peers, disk) = stack_of(clock, 0.1, 0.2)
    keys = keys_of(4)
    write(disk, keys[:3])
    buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]
    assert stack.read(keys, buffers, "the peer") == 3
    assert peers.asked == [(1, "the peer")]


def test_each_tier_has_its_own_counts_in_metrics(clock: VirtualClock) -> None:
    stack, (peers, _) = stack_of(clock, 0.1, 0.2)
    write(peers, keys_of(3))
    tiers = counts_by_tier(stack)
    text = Exposition(ServerMetrics("m", lambda: EngineStats(tiers=tiers))).page()[0].decode()
    assert 'quire:kv_tier_blocks{engine="0",model_name="m",tier="peers"} 3.0' in text
    assert 'quire:kv_tier_blocks_read_total{engine="0",model_name="m",tier="disk"} 0.0' in text
    assert "kv_tier" not in Exposition(ServerMetrics("m", EngineStats)).page()[0].decode()

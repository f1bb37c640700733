"""Ranks of this machine that exchange as those of several nodes do, for tests."""

from __future__ import annotations

import socket

from quire.config import EngineConfig
from quire.executor.rank_group import RankGroup, RankHandle
from quire.executor.rank_messages import Channel
from quire.executor.rank_processes import LocalRank, make_memory, start_process
from quire.parallel.placement import Meeting, place
from quire.parallel.segment import SLOT_BYTES, remove

HOST = "127.0.0.1"


def start_apart(nodes: int, config: EngineConfig) -> RankGroup:
    """As `start_here`, for one stage, with the ranks on ``nodes`` of which each has a segment of its own."""
    topology = config.topology
    assert topology.pp == 1
    placement = place(topology, nodes)
    memories = [make_memory(topology, SLOT_BYTES) if placement.shares_memory else "" for _ in range(nodes)]
    store = socket.create_server((HOST, 0))
    meeting = Meeting(HOST, store.getsockname()[1], HOST, placement.crossing)
    ranks: list[RankHandle] = []
    with store:
        for number in range(topology.world_size):
            (channel, theirs), (life, their_life) = socket.socketpair(), socket.socketpair()
            with theirs, their_life:
                ends = [theirs, their_life, None, None, None if number else store]
                memory = memories[placement.bundle_of(number)]
                popen = start_process(number, memory, ends)
            ranks.append(LocalRank(number, Channel(channel), life, (), memory, popen, meeting))

    def clean_up() -> None:
        for memory in memories:
            remove(memory)

    return RankGroup(config, ranks, clean_up)

"""Ranks whose steps are not replayed from a recording say so: at the start, and in the metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.parallel.serving import CASE, config_of

from quire.engine.build import describe
from quire.executor.ranks import RanksExecutor
from quire.kernels.registry import NATIVE_LEVELS, backends, native
from quire.parallel.topology import Topology
from quire_lab.cli.doctor_server import ranks_of

NATIVE = next((level for level in NATIVE_LEVELS if level in backends("linear")), "reference")


@pytest.mark.skipif(native is None, reason="the native extension is not built")
@pytest.mark.parametrize(
    ("topology", "isa", "replays"),
    [
        (Topology(ep=2), NATIVE, True),
        pytest.param(Topology(tp=2, pp=2), NATIVE, True, marks=pytest.mark.slow),
        pytest.param(Topology(cp=2), NATIVE, True, marks=pytest.mark.slow),
        (Topology(pp=2), "reference", False),
    ],
    ids=str,
)
def test_ranks_say_whether_their_steps_are_recorded(topology: Topology, isa: str, replays: bool) -> None:
    config = config_of(replace(CASE, cpu_isa=isa), topology)
    executor = RanksExecutor(config)
    try:
        assert [each.replays for each in executor.rank_stats().about] == [replays] * topology.world_size
        assert all(bool(each.call_by_call) != replays for each in executor.loaded)
        assert "call by call" not in describe(config, "ranks", 0.0, executor.loaded).kernels
        slow = [each._replace(call_by_call="for a reason") for each in executor.loaded]
    finally:
        executor.close()
    said = describe(config, "ranks", 0.0, slow).kernels
    assert said.endswith("2 of them call by call") == (isa != "reference" and topology.world_size == 2)


def test_doctor_reads_whether_steps_are_recorded() -> None:
    (rank,) = ranks_of({"quire:rank_info{cores=1,host=a,pid=7,rank=0,stage=0,steps=call by call}": 1.0})
    assert rank["steps"] == "call by call"

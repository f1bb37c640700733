"""A model over two context-parallel ranks, in two processes: transformers' answers, and exact within the size."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.parallel.ranks import Helpers, RankedWorker
from tests.parity import harness
from tests.parity.families import CASES, CONTEXT, make
from tests.parity.harness import check

from quire.config import EngineConfig
from quire.parallel.topology import Topology

DEFAULT = ("llama_bias_tied", "gemma3", "deepseek_v3")


@pytest.fixture
def over_two_ranks(helpers: Helpers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness of the parity tests builds its workers over two ranks, with blocks of four positions on each."""

    def make_ranked(config: EngineConfig, weights: object, clock: object) -> RankedWorker:
        return RankedWorker(config, Topology(cp=2), helpers)

    monkeypatch.setattr(harness, "Worker", make_ranked)


@pytest.mark.usefixtures("over_two_ranks")
@pytest.mark.parametrize("chunk", [7, 40], ids=["small", "divided"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in DEFAULT else pytest.mark.slow) for case in CASES]
)
def test_family_over_two_stripes(
    case: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of small chunks are computed by both ranks; the rows of large ones are divided."""
    monkeypatch.setattr(harness, "CHUNK", chunk)
    check(tmp_path, make(case, tmp_path), CONTEXT)

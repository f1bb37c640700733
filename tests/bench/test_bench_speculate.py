"""`quire bench speculate` on a pair of checkpoints that agree with a chosen probability."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch
from benchmarks import make_pair

from quire.args import EngineArgs
from quire.errors import ConfigError
from quire_lab.bench.args import SpeculateBenchArgs
from quire_lab.bench.speculate import speculate


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cycle through all ids; the draft leaves it at every fifth id."""
    folder = tmp_path_factory.mktemp("pair")
    torch.manual_seed(3)
    follow = (torch.arange(4096) + 1) % 4096
    make_pair.write(folder / "target", "tiny", follow)
    make_pair.write(folder / "draft", "tiny", torch.where(torch.arange(4096) % 5 == 0, 7, follow))
    return folder


def test_tokens_per_round_are_those_of_theory(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = EngineArgs(
        model=str(pair / "target"),
        draft_model=str(pair / "draft"),
        kv_memory="32MiB",
        max_model_len=256,
        threads=1,
    )
    results, svg = pair / "out.json", pair / "out.svg"
    args = SpeculateBenchArgs(
        drafts="2,4", batch_sizes="1,2", output_len=60, rounds=2, clock="cpu", json=str(results), svg=str(svg)
    )
    assert speculate(engine, args) == 0
    found = json.loads(results.read_text())
    assert [(each["batch"], each["drafts"]) for each in found] == [
        (batch, drafts) for batch in (1, 2) for drafts in (0, 2, 4, None)
    ]
    for each in found:
        assert each["tokens_per_s"] > 0
        if each["drafts"]:
            assert each["c"] > 0
            assert each["v"] > 0
            # Every fifth draft is wrong: rounds of γ = 2 and 4 give as many tokens as independent drafts do, nearly.
            assert each["tokens_per_round"] == pytest.approx(each["expected_tokens"], rel=0.12)
            assert each["expected_speedup"] == pytest.approx(each["speedup"], rel=0.35)
    assert len(xml.etree.ElementTree.fromstring(svg.read_text()).findall("{*}polyline")) == 4
    assert "| 2 | auto |" in capsys.readouterr().out


def test_wrong_lists_are_refused() -> None:
    for values, message in (
        ({"drafts": "2,x"}, "drafts = '2,x'"),
        ({"drafts": "64"}, "1…32"),
        ({"batch_sizes": "0"}, "batch_sizes"),
    ):
        with pytest.raises(ConfigError, match=message):
            speculate(EngineArgs(model="quill", draft_model="self:int8"), SpeculateBenchArgs(**values))

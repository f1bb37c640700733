"""A model over two tensor-parallel ranks, in two processes: transformers' answers, and exact within the size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tests.lora import test_ends
from tests.lora import test_parity as adapters
from tests.parallel.ranks import Helpers, RankedWorker
from tests.parity import harness
from tests.parity.families import CASES, CONTEXT, make, save
from tests.parity.harness import check

from quire.config import EngineConfig
from quire.parallel.topology import Topology

ROWS, SUMS = Topology(ep=2), Topology(tp=2)
DEFAULT = ("llama_bias_tied", "gemma3")


@pytest.fixture(params=[ROWS, SUMS], ids=["rows", "sums"])
def over_two_ranks(request: pytest.FixtureRequest, helpers: Helpers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness of the parity tests builds its workers over two ranks."""

    def make_ranked(config: EngineConfig, weights: object, clock: object) -> RankedWorker:
        return RankedWorker(config, request.param, helpers)

    monkeypatch.setattr(harness, "Worker", make_ranked)


@pytest.mark.usefixtures("over_two_ranks")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in DEFAULT else pytest.mark.slow) for case in CASES]
)
def test_family_over_two_ranks(case: str, tmp_path: Path) -> None:
    model = make(case, tmp_path)
    check(tmp_path, model, CONTEXT)


@pytest.mark.usefixtures("over_two_ranks")
@pytest.mark.parametrize("case", ["llama", pytest.param("deepseek_v2", marks=pytest.mark.slow)])
def test_adapters_over_two_ranks_are_merged_weights(case: str, tmp_path: Path) -> None:
    """Five sequences, two adapters: A is cut with the columns of its matrix, B with the rows."""
    adapters.test_against_merged_weights(case, tmp_path)


@pytest.mark.usefixtures("over_two_ranks")
@pytest.mark.parametrize("case", ["llama", pytest.param("llama_bias_tied", marks=pytest.mark.slow)])
def test_changed_ends_over_two_ranks_are_merged_weights(case: str, tmp_path: Path) -> None:
    """Each rank has its ids of the output matrix, and all of what changes the embedding."""
    test_ends.check(case, [test_ends.CHANGES[2], test_ends.CHANGES[3]], tmp_path)


def test_dora_needs_whole_rows(helpers: Helpers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks that share rows have whole ones; ranks whose sums are added do not, and say so."""
    for topology, text in ((ROWS, ""), (SUMS, "DoRA of .* needs whole rows of the matrix")):
        monkeypatch.setattr(
            harness, "Worker", lambda config, *_, at=topology: RankedWorker(config, at, helpers)
        )
        folder, changes = tmp_path / str(topology), [{}, {"lm_head": "low"}]
        if not text:
            test_ends.check("llama", changes, folder, dora=True)
        else:
            with pytest.raises(AssertionError, match=text):
                test_ends.check("llama", changes, folder, dora=True)


LOAD = """
import sys
from quire.engine.assemble import configure
from quire.args import EngineArgs
from quire.device import detect_device
from quire.models.loader import iter_weights
from quire.parallel.shard import shard
from quire.parallel.topology import Topology
import torch

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

config, _ = configure(EngineArgs(model=sys.argv[1], kv_memory="16MiB"), detect_device())
mine = shard(config.model.spec, Topology(**{sys.argv[3]: 2}), int(sys.argv[2]))
share = mine.weight_bytes("bfloat16")
before, held, start = peak(), torch.empty(share, dtype=torch.uint8), 0
for name, weight in iter_weights(config.model, torch.bfloat16, cuts=mine.cuts):
    size = weight.nbytes
    held[start : start + size] = weight.reshape(-1).view(torch.uint8)
    start += size
assert start == share, (start, share)
print(share, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_a_rank_reads_its_slices_alone(axis: str, tmp_path: Path) -> None:
    """The peak of memory while a rank loads is its share and one matrix, whose pages are dropped after it."""
    sizes = {"vocab_size": 4096, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
    if axis == "tp":
        config = transformers.LlamaConfig(
            **sizes, intermediate_size=4096, num_hidden_layers=12, dtype="bfloat16"
        )
        save(transformers.LlamaForCausalLM(config).to(torch.bfloat16), tmp_path)
    else:
        config = transformers.MixtralConfig(
            **sizes, intermediate_size=1024, num_hidden_layers=6, num_local_experts=8, dtype="bfloat16"
        )
        save(transformers.MixtralForCausalLM(config).to(torch.bfloat16), tmp_path)
    for rank in range(2):
        done = subprocess.run(
            [sys.executable, "-c", LOAD, str(tmp_path), str(rank), axis],
            check=True,
            capture_output=True,
            text=True,
        )
        share, peak = map(int, done.stdout.split())
        assert share > 150 << 20
        assert peak <= share * 1.05 + (24 << 20)  # the modules that open files

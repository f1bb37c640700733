"""A model over two context-parallel ranks, in two processes: transformers' answers, and exact within the size."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.exact.engine_run import Policy, engine_config
from tests.parallel.ranks import Helpers, RankedWorker, ranked
from tests.parity import harness
from tests.parity.families import CASES, CONTEXT, make
from tests.parity.harness import check

from quire.clock import VirtualClock
from quire.config import EngineConfig
from quire.kernels.registry import NATIVE_LEVELS, backends
from quire.models import loader
from quire.models.loader import iter_weights
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec
from quire.parallel.topology import Topology
from quire.request import Sampling
from quire.rope_spec import RopeSpec
from quire.runner.memory import torch_dtype
from quire.runner.worker import Worker
from quire.step import NewSeq, SeqPlan, StepPlan

NATIVE = next((level for level in NATIVE_LEVELS if level in backends("linear")), "reference")
# Families that `resolve` refuses here. A rank that ends takes the helpers of all other cases along.
_REFUSED = (
    "gemma4",
    "qwen3_5",
    "qwen3_next",
    "lfm",
    "granitemoehybrid",
    "nemotron_h",
    "falcon_h1",
    "kimi",
    "bailing",
)
FAMILIES = [case for case in CASES if not case.startswith(_REFUSED)]
DEFAULT = ("llama_bias_tied", "gemma3", "deepseek_v3", "cohere")


@pytest.fixture
def over_two_ranks(helpers: Helpers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness of the parity tests builds its workers over two ranks, with blocks of four positions on each."""

    def make_ranked(config: EngineConfig, weights: object, clock: object) -> RankedWorker:
        return RankedWorker(config, Topology(cp=2), helpers)

    monkeypatch.setattr(harness, "Worker", make_ranked)


@pytest.mark.usefixtures("over_two_ranks")
@pytest.mark.parametrize("chunk", [7, 90], ids=["small", "divided"])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in DEFAULT else pytest.mark.slow) for case in FAMILIES]
)
def test_family_over_two_stripes(
    case: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of small chunks are computed by both ranks; the rows of large ones are divided."""
    monkeypatch.setattr(harness, "CHUNK", chunk)
    check(tmp_path, make(case, tmp_path), CONTEXT)


LONG = 32_768
BLOCK = 32  # positions over both ranks


def long_config(dtype: str, budget: int = 4096) -> EngineConfig:
    attention = AttentionSpec(4, 2, 16, 16, scale=0.25, rope=RopeSpec(theta=1e6, dim=16))
    spec = ModelSpec(
        "llama", "LlamaForCausalLM", 131, 64, (LayerSpec(attention, MlpSpec(96)),) * 2, 1e-5,
        max_position_embeddings=2 * LONG, dtype=dtype, eos_token_ids=(2,),
    )  # fmt: skip
    policy = Policy("continuous", "fcfs", budget)
    return engine_config(
        spec,
        dtype, num_blocks=LONG // BLOCK + 2, block_size=BLOCK, policy=policy, cpu_isa=NATIVE,
        max_model_len=LONG + BLOCK,
    )  # fmt: skip


def logits_of(worker: Worker | RankedWorker, chunk: int) -> torch.Tensor:
    """Of the prompt's last token and of five generated ones: ``[6, vocab_size]``."""
    rng = random.Random(7)
    prompt = tuple(rng.randrange(3, 131) for _ in range(LONG))
    rows: list[torch.Tensor] = []
    worker.runner.observe_logits = lambda seq_id, position, row: rows.append(row.clone())
    new = NewSeq(1, 0, prompt, (), Sampling(temperature=0.0, seed=1, max_tokens=6), 0)
    blocks = (tuple(range(LONG // BLOCK + 1)),)
    spans = [(start, min(chunk, LONG - start)) for start in range(0, LONG, chunk)]
    spans += [(LONG + i, 1) for i in range(5)]
    for step, (start, count) in enumerate(spans):
        plan = SeqPlan(1, 0, start, count, *(((0,), blocks) if step == 0 else ((), ())))
        result = worker.execute(StepPlan(step, (new,) if step == 0 else (), (plan,)))
        assert result.error is None, result.error
    worker.execute(StepPlan(len(spans), gone=(1,)))
    return torch.stack(rows)


@pytest.mark.slow
@pytest.mark.skipif(NATIVE == "reference", reason="32k tokens take minutes on the reference kernels")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05)])
def test_a_prompt_of_32k_tokens_over_two_stripes(
    dtype: str, tolerance: float, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one process within tolerance; and the same bits in chunks that are divided, that are not, and of odd sizes."""
    monkeypatch.setattr(loader, "STD", 0.3)
    config = long_config(dtype)
    alone = Worker(config, iter_weights(config.model, torch_dtype(dtype)), VirtualClock())
    expected = logits_of(alone, 2048)
    with ranked(config, Topology(cp=2), helpers, 0.3) as worker:
        found = logits_of(worker, 2048)
        assert torch.equal(logits_of(worker, 1711), found)
        assert torch.equal(logits_of(worker, 48), found)
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    print(f"max|Δ logit| / max|logit| = {error:.1e}")
    assert error < tolerance
    assert found.argmax(1).tolist() == expected.argmax(1).tolist()

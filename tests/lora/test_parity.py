"""Adapters against transformers in float32: with the merged weights W + s·B A, and with PEFT itself where it is there.

Five ragged sequences in chunks: some with one adapter, some with another, one of the base model, in the same steps.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from tests.lora.peft_files import PREFIX, linears, tensors, write_adapter
from tests.parity.families import CASES, CONTEXT, make
from tests.parity.harness import SEED, TOLERANCE, VOCAB, Run, compare, prompts_of, run_ragged
from transformers import PreTrainedModel

from quire.lora.adapter import read_adapter
from quire.models.checkpoint import describe
from quire.request import Adapter

DENSE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS: dict[str, tuple[str, ...]] = {
    "llama": DENSE,
    "llama_bias_tied": DENSE,
    "qwen3": DENSE,
    "gemma2": DENSE,
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "mixtral": ("q_proj", "v_proj"),
    "deepseek_v2": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
    # Rows of q and of its gate alternate in q_proj, head by head.
    "qwen3_5": (*DENSE, "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
    "qwen3_next": ("q_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"),
}
NEW_TOKENS = 12


def merge_into(model: PreTrainedModel, stored: dict[str, torch.Tensor], scale: float) -> PreTrainedModel:
    """A copy of ``model`` with ``W + scale · B A`` in every linear of the adapter."""
    merged = copy.deepcopy(model)
    with torch.no_grad():
        for name, low in stored.items():
            if name.endswith("lora_A.weight"):
                module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
                merged.get_submodule(module).weight += scale * stored[name.replace("lora_A", "lora_B")] @ low
    return merged


def parts_of(run: Run, mine: list[int]) -> Run:
    return Run(*([values[i] for i in mine] for values in (run.prompts, run.tokens, run.logits)))


@pytest.mark.parametrize("case", TARGETS)
def test_against_merged_weights(case: str, tmp_path: Path) -> None:
    assert case in CASES
    model = make(case, tmp_path / "base")
    spec = describe(tmp_path / "base").spec
    shapes = linears(dict(model.state_dict()), TARGETS[case])
    adapters: list[Adapter] = []
    models: list[PreTrainedModel] = []
    for index, (rank, alpha) in enumerate(((4, 8), (7, 7))):
        stored = tensors(shapes, rank, seed=index, std=0.15)
        path = write_adapter(
            tmp_path / str(index), stored, r=rank, lora_alpha=alpha, target_modules=list(TARGETS[case])
        )
        adapters.append(read_adapter(str(index), path, spec).adapter)
        models.append(merge_into(model, stored, alpha / rank))
    one, two = adapters
    prompts = prompts_of(VOCAB, SEED)
    run = run_ragged(
        tmp_path / "base", prompts, CONTEXT, new_tokens=NEW_TOKENS, adapters=(one, two, None, two, one)
    )
    for which, mine in ((models[0], [0, 4]), (models[1], [1, 3]), (model, [2])):
        assert compare(parts_of(run, mine), which) <= TOLERANCE
    with pytest.raises(AssertionError):  # the adapter is not nothing
        assert compare(parts_of(run, [0, 4]), model) <= TOLERANCE


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("case", ["llama", "phi3"])
def test_against_peft(case: str, rslora: bool, tmp_path: Path) -> None:
    """What PEFT itself writes: patterns of ranks and alphas, all-linear, rank-stabilized."""
    peft = pytest.importorskip("peft")
    model = make(case, tmp_path / "base")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=10,
        target_modules="all-linear",
        use_rslora=rslora,
        rank_pattern={"o_proj": 6, r"layers\.1\.mlp\.down_proj": 2},
        alpha_pattern={"down_proj": 3},
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
        adapted.save_pretrained(tmp_path / "adapter")
    adapter = read_adapter("a", tmp_path / "adapter", describe(tmp_path / "base").spec).adapter
    assert adapter.rank == 6
    run = run_ragged(
        tmp_path / "base", prompts_of(VOCAB, SEED), CONTEXT, new_tokens=NEW_TOKENS, adapters=(adapter,) * 5
    )
    assert compare(run, adapted) <= TOLERANCE

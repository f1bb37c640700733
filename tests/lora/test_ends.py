"""Adapters that change the ends of a model, and DoRA, against transformers in float32 with merged weights.

A merged model is untied first: PEFT adapts the embedding and the output matrix each by itself, also where the model has
one matrix for both. PEFT itself is compared with where it is there.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lora.peft_files import PREFIX, end_tensors, linears, tensors, with_magnitudes, write_adapter
from tests.lora.test_parity import NEW_TOKENS, parts_of
from tests.parity.families import CONTEXT, make
from tests.parity.harness import SEED, TOLERANCE, VOCAB, compare, prompts_of, run_ragged
from transformers import PreTrainedModel

from quire.lora.adapter import read_adapter
from quire.models.checkpoint import describe

ENDS = {"embed_tokens": "model.embed_tokens", "lm_head": "lm_head"}
TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")
SCALE = 2.0  # alpha 8, rank 4


def untied(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of ``model`` with an output matrix of its own."""
    made = copy.deepcopy(model)
    made.config.tie_word_embeddings = False
    made.lm_head.weight = torch.nn.Parameter(made.lm_head.weight.detach().clone())
    return made


def merged(model: PreTrainedModel, stored: dict[str, torch.Tensor]) -> PreTrainedModel:
    """A copy of ``model`` with what PEFT computes of ``stored`` in its weights."""
    made = untied(model)
    with torch.no_grad():
        for name, tensor in stored.items():
            module, _, kind = name.removeprefix(PREFIX).partition(".lora_")
            if not kind:
                made.get_submodule(module.removesuffix(".weight")).weight.copy_(tensor)
            if not kind.startswith(("A", "embedding_A")):
                continue
            weight = made.get_submodule(module).weight
            delta = SCALE * stored[name.replace("_A", "_B")] @ tensor
            whole = weight + (delta.T if kind.startswith("embedding") else delta)
            magnitude = stored.get(f"{PREFIX}{module}.lora_magnitude_vector")
            if magnitude is None:
                weight.copy_(whole)
            elif kind.startswith("embedding"):
                weight.copy_(whole * (magnitude / whole.norm(dim=0)))
            else:
                weight.copy_(whole * (magnitude / whole.norm(dim=1)).unsqueeze(1))
    return made


def ends_of(kinds: dict[str, str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and settings of an adapter: "embed_tokens", "lm_head" → "low" or "whole"."""
    stored = end_tensors(VOCAB, 48, 4, *(end for end, kind in kinds.items() if kind == "low"))
    rng = torch.Generator().manual_seed(3)
    for end, kind in kinds.items():
        if kind == "whole":
            stored[f"{PREFIX}{ENDS[end]}.weight"] = torch.randn(VOCAB, 48, generator=rng) * 0.3
    low = [end for end, kind in kinds.items() if kind == "low"]
    saved = [end for end, kind in kinds.items() if kind == "whole"]
    return stored, {"target_modules": [*TARGETS, *low], "modules_to_save": saved or None}


CHANGES: tuple[dict[str, str], ...] = (
    {"embed_tokens": "low"},
    {"lm_head": "low"},
    {"embed_tokens": "low", "lm_head": "low"},
    {"embed_tokens": "whole", "lm_head": "whole"},
    {"embed_tokens": "low", "lm_head": "whole"},
)


def check(case: str, changes: list[dict[str, str]], folder: Path, *, dora: bool = False) -> None:
    """Two adapters and the base model in the same steps, each as transformers computes it."""
    model = make(case, folder / "base")
    spec = describe(folder / "base").spec
    adapters, models = [], []
    for index, kinds in enumerate(changes):
        more, settings = ends_of(kinds)
        shapes = linears(dict(model.state_dict()), TARGETS)
        stored = tensors(shapes, 4, seed=index, std=0.15) | more
        if dora:
            stored = with_magnitudes(stored)
        path = write_adapter(folder / str(index), stored, use_dora=dora, **settings)
        adapters.append(read_adapter(str(index), path, spec).adapter)
        models.append(merged(model, stored))
    one, two = adapters
    run = run_ragged(
        folder / "base", prompts_of(VOCAB, SEED), CONTEXT, new_tokens=NEW_TOKENS, adapters=(one, two, None, two, one)
    )  # fmt: skip
    for which, mine in ((models[0], [0, 4]), (models[1], [1, 3]), (model, [2])):
        assert compare(parts_of(run, mine), which) <= TOLERANCE
    with pytest.raises(AssertionError):  # the adapter is not nothing
        assert compare(parts_of(run, [0, 4]), model) <= TOLERANCE


@pytest.mark.parametrize("case", ["llama", "llama_bias_tied", "gemma2", "granite"])
@pytest.mark.parametrize("index", range(len(CHANGES)))
def test_ends_are_those_of_merged_weights(case: str, index: int, tmp_path: Path) -> None:
    """Plain and tied, with scaled embeddings, scaled and capped logits; beside another adapter and the base model."""
    check(case, [CHANGES[index], CHANGES[(index + 1) % len(CHANGES)]], tmp_path)


@pytest.mark.parametrize("case", ["llama", "llama_bias_tied", "gemma2"])
def test_dora_is_that_of_merged_weights(case: str, tmp_path: Path) -> None:
    """Of linears with and without biases, and of both ends."""
    check(case, [{}, {"embed_tokens": "low", "lm_head": "low"}], tmp_path, dora=True)


PEFT_SETTINGS: tuple[dict[str, Any], ...] = (
    {"target_modules": ["q_proj", "embed_tokens"]},
    {"target_modules": ["q_proj", "lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    {"target_modules": ["q_proj", "lm_head", "embed_tokens"], "modules_to_save": ["lm_head"]},
    {"target_modules": "all-linear", "use_dora": True},
    {"target_modules": ["q_proj", "lm_head", "embed_tokens"], "use_dora": True, "use_rslora": True},
    {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "ensure_weight_tying": True},
)


@pytest.mark.parametrize("case", ["llama", "llama_bias_tied", "gemma2"])
@pytest.mark.parametrize("settings", PEFT_SETTINGS, ids=str)
def test_what_peft_writes_is_what_peft_computes(case: str, settings: dict[str, Any], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = make(case, tmp_path / "base")
    torch.manual_seed(5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(
            r=4, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **settings
        )
        adapted = peft.get_peft_model(copy.deepcopy(model), config).eval()
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if "modules_to_save" in name or "magnitude" in name:
                    weight.add_(torch.randn_like(weight) * 0.3)
                elif "lora_embedding" in name:  # PEFT begins with 1.0
                    weight.mul_(0.2)
        adapted.save_pretrained(tmp_path / "adapter")
    adapter = read_adapter("a", tmp_path / "adapter", describe(tmp_path / "base").spec).adapter
    run = run_ragged(
        tmp_path / "base", prompts_of(VOCAB, SEED), CONTEXT, new_tokens=NEW_TOKENS, adapters=(adapter,) * 5
    )
    assert compare(run, adapted) <= TOLERANCE

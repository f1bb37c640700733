"""Model folders with one key changed at random, what transformers computes of them, and what Quire does.

A change is fair where both read the folder alike, or Quire refuses it with an error that names the key. Where
transformers itself fails, or fills in missing weights at random, Quire must refuse too, or compute what it computes
without the change.
"""

from __future__ import annotations

import json
import os
import random
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.found.small_tokenizer import write_tokenizer
from tests.parity.families import CASES, ROPES, make
from tests.parity.harness import TOLERANCE, run_ragged
from transformers import AutoModelForCausalLM, PreTrainedModel

from quire.errors import QuireError

REMOVED = "<removed>"
IDS = [(7 * i + 5) % 190 + 3 for i in range(40)]
MAX_MODEL_LEN = 256
# Kinds of rotary embedding that transformers does not choose anew for every length.
_FIXED_ROPES = ("linear", "yarn", "yarn_factor", "llama3")
_PLAIN_ROPE = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "granite", "smollm3", "mixtral", "qwen3_moe")
# Keys that a file may have beside those that transformers writes, with values that say something.
FURTHER: dict[str, list[Any]] = {
    "attention_bias": [True], "mlp_bias": [True], "qkv_bias": [False], "head_dim": [12, 16],
    "sliding_window": [8, 0, -1, None], "use_sliding_window": [True], "max_window_layers": [0, 1],
    "layer_types": [["sliding_attention"] * 3], "partial_rotary_factor": [0.5, 1.0],
    "rope_theta": [1e6, 500.0], "rope_local_base_freq": [500.0],
    "rope_scaling": [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "default"},
                     {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}],
    "rope_parameters": [{"rope_type": "linear", "factor": 2.0}, {"rope_theta": 500.0}],
    "torch_dtype": ["auto", "bfloat16"], "dtype": ["auto", "float16"],
    "architectures": [["Foo"], [], ["LlamaForCausalLM"]], "model_type": ["llama", "qwen2", "unknown"],
    "quantization_config": [{"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}],
    "tie_word_embeddings": [True, False], "hidden_act": ["gelu", "relu", "gelu_pytorch_tanh"],
    "hidden_activation": ["gelu"], "final_logit_softcapping": [5.0], "attn_logit_softcapping": [5.0],
    "use_bidirectional_attention": [True], "is_causal": [False], "is_decoder": [True], "clip_qkv": [1.0],
    "num_nextn_predict_layers": [0, 1], "original_max_position_embeddings": [32], "scoring_func": ["sigmoid"],
    "norm_topk_prob": [True, False], "no_rope_layers": [[1, 0, 1, 0, 1]], "pretraining_tp": [2],
    "sliding_window_pattern": [2], "text_config": [{}], "unknown_key": [3],
}  # fmt: skip
# An error about a key may name the one that stands for it.
_ALSO_NAMED = {"torch_dtype": ("dtype",), "rope_parameters": ("rope_scaling", "rope_theta", "rope_type")}


@dataclass(frozen=True)
class Change:
    """``value`` under ``key`` of ``file``; ``inside``: a key of the object that ``key`` holds."""

    file: str
    key: str
    value: Any
    inside: str | None = None

    def apply(self, config: dict[str, Any]) -> dict[str, Any]:
        changed = json.loads(json.dumps(config))
        within = changed if self.inside is None else changed[self.key]
        name = self.key if self.inside is None else self.inside
        if isinstance(self.value, str) and self.value == REMOVED:
            within.pop(name, None)
        else:
            within[name] = self.value
        return changed

    def is_named(self, error: str) -> bool:
        names = (self.key, *_ALSO_NAMED.get(self.key, ()), *([self.inside] if self.inside else []))
        return any(name in error for name in names)

    def __str__(self) -> str:
        key = self.key if self.inside is None else f"{self.key}.{self.inside}"
        return f"{self.file}: {key} = {json.dumps(self.value)}"


def other_values(value: Any) -> list[Any]:
    """Return values that could stand where ``value`` does, right and wrong ones."""
    if isinstance(value, bool):
        return [not value, None, REMOVED, "true"]
    if isinstance(value, int):
        return [value * 2, max(value // 2, 1), value + 1, 0, -1, None, REMOVED, float(value), str(value)]
    if isinstance(value, float):
        return [value * 10, value / 10, value * 1.5, 0, -value, None, REMOVED, str(value)]
    if isinstance(value, str):
        return [None, REMOVED, "nonsense"]
    if isinstance(value, list):
        return [value[:-1], value[::-1], None, REMOVED, []]
    return [REMOVED, None, {}] if isinstance(value, dict) else [REMOVED, 1, 2.5, True]


@dataclass
class Folders:
    """Writes folders below ``root``; those without a change are made once per family and shape."""

    root: Path
    _bases: dict[str, tuple[Path, dict[str, Any], torch.Tensor]] = field(default_factory=dict)
    _count: int = 0

    def base(self, case: str, rope: str) -> tuple[Path, dict[str, Any], torch.Tensor]:
        """Return the folder of a family, its configuration, and the logits of its last position."""
        name = f"{case}-{rope}"
        if name not in self._bases:
            folder = self.root / name
            changes = {} if rope == "own" else {"rope_parameters": {"rope_theta": 1e4, **ROPES[rope]}}
            make(case, folder, seed=sum(name.encode()), **changes)
            write_tokenizer(folder)
            config = json.loads((folder / "config.json").read_text())
            logits, why = expected(folder)
            assert logits is not None, why
            self._bases[name] = folder, config, logits
        return self._bases[name]

    def changed(self, case: str, rope: str, change: Change) -> Path:
        """Return a folder with the weights of the base and one key changed."""
        base, config, _ = self.base(case, rope)
        self._count += 1
        folder = self.root / f"case-{self._count}"
        folder.mkdir()
        os.link(base / "model.safetensors", folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(change.apply(config)))
        return folder


def random_change(rng: random.Random, config: dict[str, Any]) -> Change:
    """Return one change of a ``config.json``: of a key that it has, of one inside, or of one that it may have."""
    present = rng.random() < 0.6
    key = rng.choice(sorted(config) if present else sorted(FURTHER))
    value = config.get(key)
    if isinstance(value, dict) and value and rng.random() < 0.7:
        inside = rng.choice(sorted(value))
        return Change("config.json", key, rng.choice(other_values(value[inside])), inside)
    values = other_values(value) if key in config else []
    return Change("config.json", key, rng.choice([*values, *FURTHER.get(key, [])]))


def expected(folder: Path) -> tuple[torch.Tensor | None, str]:
    """Return transformers' logits of the last position, or None and why there are none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
        if info["missing_keys"] or info["mismatched_keys"]:
            return None, f"weights are missing: {sorted(info['missing_keys'])[:2]}"
        return logits_of(model.eval()), ""
    except Exception as error:  # whatever it cannot do is no value to compare with
        return None, f"{type(error).__name__}: {error}"


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    found = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0, -1].float()
    assert isinstance(found, torch.Tensor)
    return found


def ours(folder: Path) -> tuple[torch.Tensor | None, str]:
    """Return Quire's logits of the last position, or None and its error."""
    try:
        return run_ragged(folder, [IDS], MAX_MODEL_LEN, new_tokens=1).logits[0][0], ""
    except QuireError as error:
        return None, str(error)


def is_close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.shape == wanted.shape and bool(
        (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
    )


def meant(config: dict[str, Any], change: Change) -> Change | None:
    """Return the change that says in one spelling what ``change`` says in two; None where they contradict."""
    parameters = config.get("rope_parameters")
    if change.key not in ("rope_scaling", "rope_theta", "rope_local_base_freq") or parameters is None:
        return change
    is_local = change.key == "rope_local_base_freq"
    by_type = "full_attention" in parameters
    if is_local and not by_type:
        return change  # a key of another family
    part = "sliding_attention" if is_local else "full_attention"
    own = parameters[part] if by_type else parameters
    scaling = change.value if change.key == "rope_scaling" else {"rope_theta": change.value}
    if not isinstance(scaling, dict):
        return Change("config.json", "unknown_key", 1)
    if change.key == "rope_scaling" and scaling.get("rope_type", scaling.get("type")) in (None, "default"):
        return Change("config.json", "unknown_key", 1)
    if own.get("rope_type", "default") != "default" or change.key != "rope_scaling":
        return None
    merged = {**own, "rope_type": scaling.get("type"), **scaling}
    return Change("config.json", "rope_parameters", {**parameters, part: merged} if by_type else merged)


def fault(folders: Folders, case: str, rope: str, change: Change) -> str | None:
    """Return what is wrong with how Quire reads the folder with ``change``; None: nothing is."""
    _, config, before = folders.base(case, rope)
    found, error = ours(folders.changed(case, rope, change))
    if found is None:
        return None if change.is_named(error) else f"refused, and the error does not name the key: {error}"
    wanted_change = meant(config, change)
    if wanted_change is None:
        return "two spellings contradict each other, and nothing says so"
    wanted, why = expected(folders.changed(case, rope, wanted_change))
    if wanted is None and "expected float, got int" in why:  # JSON has one kind of number
        assert isinstance(change.value, int)
        as_float = Change(change.file, change.key, float(change.value), change.inside)
        wanted, why = expected(folders.changed(case, rope, as_float))
    if wanted is None and change.value is None:  # null stands for the default, as if left out
        without = Change(change.file, change.key, REMOVED, change.inside)
        wanted, why = expected(folders.changed(case, rope, without))
    if wanted is None:
        wanted = before
    elif is_close(found, wanted):
        return None
    if is_close(found, wanted):
        return None
    return f"logits differ from transformers' ({why or 'which loads it'})"


def random_case(rng: random.Random) -> tuple[str, str]:
    """Return a family and the kind of its rotary embedding."""
    case = rng.choice(sorted(CASES))
    return case, rng.choice(["own", *_FIXED_ROPES]) if case in _PLAIN_ROPE else "own"


def index_fault(folder: Path, rng: random.Random) -> str | None:
    """Split the folder's weights, change its index at random, and compare as `fault` does."""
    stored = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(stored)
    weight_map = {}
    for part in range(2):
        file = f"model-{part + 1:05}-of-00002.safetensors"
        save_file({name: stored[name] for name in names[part::2]}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names[part::2], file)
    name = rng.choice(names)
    kind = rng.choice(["other part", "no part", "removed", "unknown", "size", "metadata"])
    metadata: dict[str, Any] | None = {"total_size": 1}
    if kind == "other part":
        weight_map[name] = next(file for file in weight_map.values() if file != weight_map[name])
    elif kind == "no part":
        weight_map[name] = "model-00003-of-00002.safetensors"
    elif kind == "removed":
        del weight_map[name]
    elif kind == "unknown":
        weight_map["model.layers.0.foo.weight"] = weight_map[name]
    elif kind == "metadata":
        metadata = None
    index = {"weight_map": weight_map} | ({} if metadata is None else {"metadata": metadata})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found, error = ours(folder)
    if found is None:
        named = {"no part": "model-00003-of-00002", "unknown": "model.layers.0.foo.weight"}.get(kind, name)
        return None if named in error else f"index, {kind} of {name}: refused without a name: {error}"
    wanted, why = expected(folder)
    if wanted is None or is_close(found, wanted):
        return (
            None
            if wanted is not None or kind in ("removed", "other part", "metadata")
            else f"index, {kind}: {why}"
        )
    return f"index, {kind} of {name}: logits differ"

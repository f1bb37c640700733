"""Write trained heads beside Quill, in the layouts of published ones: EAGLE-3's names, Medusa's in vLLM's layout.

Usage: ``python tools/quill/export_heads.py eagle --checkpoint /tmp/quill/eagle/heads.pt``
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from export import config
from safetensors.torch import save_file
from torch import Tensor
from train_heads import DRAFT_VOCAB, EAGLE_INTERMEDIATE, MEDUSA_LAYERS, NUM_MEDUSA, QUILL, SHAPE, TAPS


def medusa(state: dict[str, Tensor]) -> tuple[dict[str, object], dict[str, Tensor]]:
    """The heads have no output matrices: they use Quill's."""
    values = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": SHAPE.hidden_size,
        "vocab_size": SHAPE.vocab_size,
        "num_heads": NUM_MEDUSA,
        "num_hidden_layers": MEDUSA_LAYERS,
        "medusa_fc_bias": False,
        "original_lm_head": True,
        "torch_dtype": "bfloat16",
    }
    return values, {name: weight.bfloat16() for name, weight in state.items()}


def eagle(state: dict[str, Tensor]) -> tuple[dict[str, object], dict[str, Tensor]]:
    """``d2t``: id of Quill minus id of the head, by row of its output matrix; ``t2d``: whether the head has an id."""
    values = config(SHAPE) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "intermediate_size": EAGLE_INTERMEDIATE,
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS), "use_aux_hidden_state": True},
    }
    ids = state.pop("ids")
    weights = {name: weight.bfloat16() for name, weight in state.items()}
    weights["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    weights["t2d"] = torch.zeros(SHAPE.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return values, weights


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=("eagle", "medusa"))
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="instead of that beside Quill")
    args = parser.parse_args()
    make = {"eagle": eagle, "medusa": medusa}[args.kind]
    values, weights = make(torch.load(args.checkpoint, weights_only=True))
    folder = args.folder or QUILL.parent / args.kind
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    file = folder / "model.safetensors"
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()}, file, metadata={"format": "pt"}
    )
    file.chmod(0o644)
    print(f"{file}: {sum(w.numel() for w in weights.values())} numbers, {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()

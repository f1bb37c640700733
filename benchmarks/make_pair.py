"""Write a target and a draft checkpoint that agree on the next token with a chosen probability α.

    python benchmarks/make_pair.py --alpha 0.8 --out /tmp/pair-0.8 [--arch llama-1b]     target and draft
    python benchmarks/make_pair.py --alpha 0.5 0.8 --out /tmp/pairs                      target, draft-0.5 and draft-0.8

In every layer the output projections of attention and MLP are zero, so the hidden state is the embedding of the last
token, and the output matrix maps token to token: row π(t) is the embedding of t. π is one cycle through all ids. The
draft has another π that equals the target's at each id with probability α, independently. All layers are computed like
any others, so times are those of the architecture, and any program that reads the format runs the same pair.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from quire.models.hub import quill_path

# hidden_size, intermediate_size, layers, heads, kv heads
ARCHITECTURES = {
    "tiny": (256, 512, 2, 4, 2),
    "small": (512, 1536, 8, 8, 4),
    "llama-1b": (2048, 8192, 16, 32, 8),
}
HEAD_DIM = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--alpha", type=float, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arch", choices=ARCHITECTURES, default="small")
    parser.add_argument("--draft-arch", choices=ARCHITECTURES, default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    names = {alpha: "draft" if len(args.alpha) == 1 else f"draft-{alpha:g}" for alpha in args.alpha}
    make(args.out, names, args.arch, args.draft_arch, args.seed)


def make(out: Path, drafts: Mapping[float, str], arch: str, draft_arch: str = "tiny", seed: int = 0) -> None:
    """Write the target, and a draft for each α in the folder that ``drafts`` names."""
    follow, generator = successors(seed), torch.Generator().manual_seed(seed + 1)
    other = (follow + torch.randint(1, len(follow), follow.shape, generator=generator)) % len(follow)
    torch.manual_seed(seed)
    write(out / "target", arch, follow)
    for alpha, name in drafts.items():
        draft = torch.where(torch.rand(len(follow), generator=generator) < alpha, follow, other)
        print(f"α = {(draft == follow).float().mean():.4f} over {len(follow)} ids")
        write(out / name, draft_arch, draft)


def successors(seed: int = 0) -> torch.Tensor:
    """Return the target's token behind each id, int64 ``[vocab_size]``: one cycle."""
    vocab_size = json.loads((quill_path("quill") / "config.json").read_text())["vocab_size"]
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    follow = torch.empty(vocab_size, dtype=torch.int64)
    follow[order] = order.roll(-1)
    return follow


def write(folder: Path, arch: str, follow: torch.Tensor) -> None:
    """Write the checkpoint whose next token behind t is ``follow[t]``, int64 ``[vocab_size]``."""
    hidden, inner, layers, heads, kv_heads = ARCHITECTURES[arch]
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(quill_path("quill") / name, folder / name)
    config = json.loads((quill_path("quill") / "config.json").read_text())
    config |= {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": HEAD_DIM, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    embedding = torch.randn(len(follow), hidden)
    # Two ids may have the same successor in the draft: the row of an id is the sum over the ids that lead to it.
    head = torch.zeros(len(follow), hidden).index_add_(0, follow, embedding)
    shapes = {
        "self_attn.q_proj": (heads * HEAD_DIM, hidden), "self_attn.k_proj": (kv_heads * HEAD_DIM, hidden),
        "self_attn.v_proj": (kv_heads * HEAD_DIM, hidden), "self_attn.o_proj": (hidden, heads * HEAD_DIM),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(hidden),
    }
    for layer in range(layers):
        for name, shape in shapes.items():
            zero = name.endswith(("o_proj", "down_proj"))
            weight = torch.zeros(shape) if zero else torch.randn(shape) * hidden**-0.5
            tensors[f"model.layers.{layer}.{name}.weight"] = weight
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
    save_file({name: t.to(torch.bfloat16) for name, t in tensors.items()}, folder / "model.safetensors")


if __name__ == "__main__":
    main()

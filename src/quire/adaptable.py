"""Which matrices of a model a LoRA adapter may change, and the bytes of the slots that hold adapters. Torch-free.

The linears of attention, of dense MLPs and of shared experts. Not routers, experts and MLA's ``kv_b`` (which is
multiplied into two other products), nor the embedding and the output matrix.
"""

from __future__ import annotations

import re

from quire.modelspec import DTYPE_BYTES, ModelSpec, weight_shapes

RANK_ALIGN = 16  # slots have room for a multiple of it
_ADAPTABLE = re.compile(
    r"layers\.\d+\.(attn\.(q|k|v|o|q_a|q_b|kv_a)|(mlp|moe\.shared)\.(gate|up|down))\.weight"
)


def adaptable(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return "layers.0.attn.q" … → (out_features, in_features)."""
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in weight_shapes(spec).items()
        if _ADAPTABLE.fullmatch(name)
    }


def adapter_bytes(spec: ModelSpec, max_rank: int, dtype: str) -> int:
    """Bytes of one slot: an A and a B of ``max_rank`` for every matrix."""
    ranks = -(-max_rank // RANK_ALIGN) * RANK_ALIGN
    return sum(out + into for out, into in adaptable(spec).values()) * ranks * DTYPE_BYTES[dtype]

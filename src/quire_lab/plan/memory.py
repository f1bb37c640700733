"""`plan_memory`: the bytes on each device of a split: weights, activations, workspace, graphs; the rest is for K and V.

K and V of a token come from `ModelSpec.kv_bytes_per_token`, the one formula; a layer with a window keeps its window.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.cost.hardware import Hardware
from quire.cost.split import (
    COLLECTIVE_BYTES,
    GRAPH_BYTES,
    KV_DTYPES,
    RUNTIME_BYTES,
    UTILIZATION,
    Split,
    Stored,
    row_bytes,
    shard_of,
)
from quire.kv_layout import SCALE_BYTES
from quire.modelspec import ModelSpec


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device, unless the name says otherwise."""

    kv_bytes_per_token: int  # whole model, layers that see the token
    kv_scale_bytes_per_token: int  # int8: 4 bytes each for K and V, per head and layer
    kv_bytes_per_request: int  # whole model at ``context``, within the layers' windows
    context: int  # tokens
    weights: int
    activations: int
    workspace: int
    graphs: int
    capacity: int
    usable: int
    kv_pool: int  # left for K and V; below 0: the model does not fit
    kv_request_share: int  # one request's K and V on one device
    max_requests: int  # requests with ``context`` tokens at once, per replica
    max_context: int  # longest request alone, in tokens, ≤ the model's positions
    draft: int = 0  # weights of the draft model
    prefix: int = 0  # K and V of a prefix that all requests share

    @property
    def fits(self) -> bool:
        return self.max_requests >= 1

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits}


def plan_memory(
    spec: ModelSpec,
    hardware: Hardware,
    split: Split,
    *,
    precision: str,
    kv_dtype: str,
    context: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    prefix: int = 0,
    stored: Stored | None = None,
) -> MemoryPlan:
    """Return the bytes that one device of ``split`` holds.

    ``prefix``: first tokens that all requests share. ``stored``: the formats of weights that a file holds rounded.
    """
    weights = round(shard_of(spec, precision, split, stored).weight_bytes)
    activations = max_num_batched_tokens * row_bytes(spec, split)
    workspace = max_num_seqs * spec.vocab_size // split.tp * 4 + RUNTIME_BYTES[hardware.kind]
    graphs = GRAPH_BYTES[hardware.kind] + (COLLECTIVE_BYTES if split.tp * split.pp * split.cp > 1 else 0)
    usable = int(hardware.memory_bytes * UTILIZATION)
    pool = usable - weights - activations - workspace - graphs
    ways = kv_ways(spec, split)
    request = kv_bytes_per_request(spec, context, kv_dtype)
    share = -(-kv_bytes_per_request(spec, context, kv_dtype, prefix) // ways)
    shared = -(-request // ways) - share
    return MemoryPlan(
        kv_bytes_per_token=kv_bytes_per_token(spec, kv_dtype),
        kv_scale_bytes_per_token=kv_scale_bytes_per_token(spec, kv_dtype),
        kv_bytes_per_request=request,
        context=context,
        weights=weights,
        activations=activations,
        workspace=workspace,
        graphs=graphs,
        capacity=hardware.memory_bytes,
        usable=usable,
        kv_pool=pool,
        kv_request_share=share,
        max_requests=max(0, (pool - shared) // share) * split.attention_dp,
        max_context=_max_context(spec, pool, kv_dtype, ways),
        prefix=shared,
    )


def _max_context(spec: ModelSpec, pool: int, kv_dtype: str, ways: int) -> int:
    """Return the most tokens of one request whose K and V fit into ``pool`` bytes on each of ``ways`` devices."""
    low, high = 0, spec.max_position_embeddings
    while low < high:
        middle = (low + high + 1) // 2
        if -(-kv_bytes_per_request(spec, middle, kv_dtype) // ways) <= pool:
            low = middle
        else:
            high = middle - 1
    return low


def kv_bytes_per_token(spec: ModelSpec, kv_dtype: str = "bf16") -> int:
    """Return the bytes of K and V of one token in all layers: 2 · layers · kv_heads · head_dim · bytes, or MLA's."""
    groups = spec.kv_layout(spec.max_position_embeddings).groups
    return sum(spec.kv_bytes_per_token(group, KV_DTYPES[kv_dtype]) for group in groups)


def with_all_kv_heads(spec: ModelSpec) -> ModelSpec:
    """Return ``spec`` with as many KV heads as query heads, as before grouped-query attention (arXiv:2305.13245)."""
    layers = (
        x if x.attn is None else replace(x, attn=replace(x.attn, num_kv_heads=x.attn.num_heads))
        for x in spec.layers
    )
    return replace(spec, layers=tuple(layers))


def kv_scale_bytes_per_token(spec: ModelSpec, kv_dtype: str) -> int:
    """Return the bytes of the scales of one token's K and V; only int8 has scales."""
    if kv_dtype != "int8":
        return 0
    return sum(2 * SCALE_BYTES * layer.heads.number for layer in spec.kv_layers())


def kv_bytes_per_request(spec: ModelSpec, context: int, kv_dtype: str = "bf16", shared: int = 0) -> int:
    """Return the bytes of K and V of a request of ``context`` tokens, prompt and output, and of its recurrent state.

    ``shared``: its first tokens, whose K and V other requests have too; a layer with a window keeps its own.
    """
    total = spec.state_bytes_per_sequence
    for group in spec.kv_layout(spec.max_position_embeddings).groups:
        num_tokens = context - shared if group.window is None else min(context, group.window)
        num_heads = sum(spec.layers[i].attention.num_kv_heads for i in group.layers)
        scales = 8 * num_heads if kv_dtype == "int8" else 0
        total += num_tokens * (spec.kv_bytes_per_token(group, KV_DTYPES[kv_dtype]) + scales)
    return total


def kv_ways(spec: ModelSpec, split: Split) -> int:
    """Return the devices of a replica over which a request's K and V are shared out; MLA's latent has one head."""
    heads = min(1 if a.is_mla else a.num_kv_heads for a in spec.attentions)
    return min(split.tp, heads) * split.pp * split.cp

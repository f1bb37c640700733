"""Bytes on each device by class: weights, activations, workspace, graphs; the rest is left for K and V.

K and V of a token come from `ModelSpec.kv_bytes_per_token`, the one formula; a layer with a window keeps its window.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from quire.modelspec import ModelSpec
from quire.plan.hardware import Hardware
from quire.plan.roofline import ACTIVATION_BYTES, KV_DTYPES
from quire.plan.split import Split, shard_of

UTILIZATION = 0.9  # share of a device's memory; the rest is fragmentation, the driver and uncounted buffers
# An accelerator's context and libraries, captured graphs, and buffers of collectives (these as aiconfigurator
# counts them for NCCL: gpu_profiles/aiconfigurator/h100_sxm.yaml, nccl_mem). A CPU process: torch and its libraries.
RUNTIME_BYTES = {"accelerator": 1 << 30, "cpu": 400 << 20}
GRAPH_BYTES = {"accelerator": 512 << 20, "cpu": 0}
COLLECTIVE_BYTES = 400 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on one device, unless the name says otherwise."""

    kv_bytes_per_token: int  # of the whole model, in the layers that see the token
    kv_scale_bytes_per_token: int  # int8: 4 bytes each for K and V, per head and layer
    kv_bytes_per_request: int  # of the whole model at ``context``; a layer with a window keeps its window
    context: int  # tokens
    weights: int
    activations: int
    workspace: int
    graphs: int
    capacity: int
    usable: int
    kv_pool: int  # left for K and V; below 0: the model does not fit
    kv_request_share: int  # of one request's K and V on one device
    max_requests: int  # of ``context`` tokens at once, in a replica

    @property
    def fits(self) -> bool:
        return self.max_requests >= 1

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"fits": self.fits}


def kv_bytes_per_token(spec: ModelSpec, kv_dtype: str = "bf16") -> int:
    """Return the bytes of K and V of one token in all layers: 2 · layers · kv_heads · head_dim · bytes, or MLA's."""
    groups = spec.kv_layout(spec.max_position_embeddings).groups
    return sum(spec.kv_bytes_per_token(group, KV_DTYPES[kv_dtype]) for group in groups)


def kv_scale_bytes_per_token(spec: ModelSpec, kv_dtype: str) -> int:
    """Return the bytes of the scales of one token's K and V; only int8 has scales."""
    if kv_dtype != "int8":
        return 0
    return sum(2 * 4 * layer.attention.num_kv_heads for layer in spec.layers)


def kv_bytes_per_request(spec: ModelSpec, context: int, kv_dtype: str = "bf16") -> int:
    """Return the bytes of K and V of a request of ``context`` tokens, prompt and output."""
    total = 0
    for group in spec.kv_layout(spec.max_position_embeddings).groups:
        kept = context if group.window is None else min(context, group.window)
        num_heads = sum(spec.layers[i].attention.num_kv_heads for i in group.layers)
        scales = 8 * num_heads if kv_dtype == "int8" else 0
        total += kept * (spec.kv_bytes_per_token(group, KV_DTYPES[kv_dtype]) + scales)
    return total


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
) -> MemoryPlan:
    """Return the bytes that one device of ``split`` holds."""
    weights = round(shard_of(spec, precision, split).weight_bytes)
    activations = max_num_batched_tokens * row_bytes(spec, split)
    workspace = max_num_seqs * spec.vocab_size // split.tp * 4 + RUNTIME_BYTES[hardware.kind]
    graphs = GRAPH_BYTES[hardware.kind] + (COLLECTIVE_BYTES if split.tp * split.pp > 1 else 0)
    usable = int(hardware.memory_bytes * UTILIZATION)
    pool = usable - weights - activations - workspace - graphs
    heads = min(1 if a.is_mla else a.num_kv_heads for a in (layer.attention for layer in spec.layers))
    request = kv_bytes_per_request(spec, context, kv_dtype)
    share = -(-request // (min(split.tp, heads) * split.pp))
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
        max_requests=max(0, pool // share) * split.attention_dp,
    )


def row_bytes(spec: ModelSpec, split: Split) -> int:
    """Return the bytes that one row's activations take at their widest: three of the hidden size, and a block's own."""
    widest = 0
    for layer in spec.layers:
        a, mlp = layer.attention, layer.mlp
        attention = a.num_heads * (2 * a.head_dim + a.v_head_dim) // split.tp
        inter = mlp.intermediate_size if mlp.moe is None else mlp.moe.top_k * mlp.moe.intermediate_size
        widest = max(widest, attention, 3 * inter // split.tp)
    return (3 * spec.hidden_size + widest) * ACTIVATION_BYTES

"""`Split`: how a model is cut over devices, and the part of each weight that one device holds.

`plan_memory` gives the bytes on each device: weights, activations, workspace, graphs; the rest is left for K and V. K
and V of a token come from `ModelSpec.kv_bytes_per_token`, the one formula; a layer with a window keeps its window.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from quire.cost.hardware import Hardware
from quire.kv_layout import SCALE_BYTES
from quire.modelspec import ModelSpec, matrix_bytes, weight_shapes
from quire.weight_format import PLAIN, WeightFormat
from quire.weight_plan import Formats, plan_weights, role_of

# Bytes per weight. fp8: a block of 128 x 128 shares a scale, which is negligible. fp4: NVFP4, 16 weights share a byte.
FLOAT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "fp4": 0.5 + 1 / 16, "mxfp4": 0.5 + 1 / 32}
PRECISIONS = (*FLOAT_BYTES, "int8", "int4")
Stored = tuple[tuple[str, WeightFormat], ...]  # the formats of weights that a file holds rounded, by name
KV_DTYPES = {"bf16": "bfloat16", "fp8": "fp8", "int8": "int8"}
ACTIVATION_BYTES = 2  # bf16 between layers


@dataclass(frozen=True, slots=True)
class Split:
    """Ways of parallelism. ``tp · pp · cp · attention_dp`` devices make a replica; ``dp`` replicas.

    ``cp``: devices that share K and V of each request by position, and have all of ``tp``'s weights.

    ``ep`` > 1: the experts of a layer lie whole on ``ep`` of the replica's devices each, tokens travel to them;
    1: every expert is cut over all. Either way a device holds the same share of their bytes.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    cp: int = 1
    attention_dp: int = 1  # ranks with attention of their own and shared experts

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.cp * self.dp * self.attention_dp

    def __str__(self) -> str:
        parts = [
            f"{name.upper()}{n}" for name in ("tp", "pp", "ep", "cp", "dp") if (n := getattr(self, name)) > 1
        ]
        return " ".join(parts) or "one device"


@dataclass(frozen=True, slots=True)
class Shard:
    """The bytes that the fullest device holds, and the weights that it multiplies per token."""

    dense_bytes: float  # all read in every step
    dense_params: float
    expert_bytes: float  # all experts on the device
    expert_params: float  # multiplied per token, on average
    head_bytes: float  # the output matrix
    head_params: float
    table_bytes: float  # a separate embedding table, of which a token reads one row

    @property
    def weight_bytes(self) -> float:
        return self.dense_bytes + self.expert_bytes + self.head_bytes + self.table_bytes


@lru_cache(maxsize=512)  # every option of a plan asks for its parts several times
def shard_of(spec: ModelSpec, precision: str, split: Split, stored: Stored | None = None) -> Shard:
    """Return the part of ``spec``'s weights on one device of ``split``, held in ``precision`` or as ``stored``.

    Linears are cut over ``tp``, experts over ``tp · attention_dp``, layers over ``pp``; norms, routers and what every
    head needs of MLA are on all.
    """
    formats = _formats(spec, precision) if stored is None else dict(stored)
    if stored is not None and split.tp > 1:  # cuts fall within the inputs that share an outer scale
        formats = {name: held.wide for name, held in stored}
    is_held = precision in ("int8", "int4") or stored is not None
    dense = dense_params = expert = expert_params = head = head_params = table = 0.0
    for name, shape in weight_shapes(spec).items():
        role = role_of(spec, name)
        held = formats.get(name, PLAIN)
        size = (
            matrix_bytes(shape, "bfloat16", held) if is_held else _float_bytes(spec, name, shape, precision)
        )
        size /= split.pp
        params = prod(shape) / split.pp
        if len(shape) == 3:
            moe = spec.layers[int(name.split(".")[1])].mlp.moe
            assert moe is not None
            ways = split.tp * split.attention_dp
            expert += size / ways
            expert_params += params / ways * moe.top_k / moe.num_experts
        elif role == "head":  # only on the last stage, which is the fullest
            head += size * split.pp / split.tp
            head_params += params * split.pp / split.tp
        elif role == "table":
            ways = split.tp if name == "embed.weight" else 1
            table += size * split.pp / ways if split.pp == 1 else 0.0
        else:
            ways = 1 if role == "other" and not name.endswith("kv_b.weight") else _ways(name, split)
            dense += size / ways
            dense_params += params / ways if len(shape) > 1 else 0.0
    return Shard(dense, dense_params, expert, expert_params, head, head_params, table)


def _ways(name: str, split: Split) -> int:
    """Whether a weight is whole on every device: MLA's low-rank inputs are, since all heads read them."""
    return 1 if name.endswith(("q_a.weight", "kv_a.weight")) else split.tp


def _formats(spec: ModelSpec, precision: str) -> Formats:
    """Return the formats of weights that the engine rounds to ``precision``."""
    text = "int4-g32" if precision == "int4" else precision
    return plan_weights(spec, {}, text, None).formats if precision in ("int8", "int4") else {}


def _float_bytes(spec: ModelSpec, name: str, shape: tuple[int, ...], precision: str) -> float:
    """Return the bytes as checkpoints hold narrow floats: linears; bf16 elsewhere.

    MXFP4 checkpoints of a model with experts (gpt-oss) hold only those in it.
    """
    wide = role_of(spec, name) != "linear" and not name.endswith("kv_b.weight")
    if precision == "mxfp4" and len(shape) < 3:
        wide = wide or any(layer.mlp.moe for layer in spec.layers)
    if wide:
        return prod(shape) * max(2.0, FLOAT_BYTES[precision])
    return prod(shape) * FLOAT_BYTES[precision]


UTILIZATION = 0.9  # share of device memory; the rest: driver, fragmentation
# An accelerator's context and libraries, captured graphs, and buffers of collectives (these as aiconfigurator
# counts them for NCCL: gpu_profiles/aiconfigurator/h100_sxm.yaml, nccl_mem). A CPU process: torch and its libraries.
RUNTIME_BYTES = {"accelerator": 1 << 30, "cpu": 400 << 20}
GRAPH_BYTES = {"accelerator": 512 << 20, "cpu": 0}
COLLECTIVE_BYTES = 400 << 20


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


def kv_ways(spec: ModelSpec, split: Split) -> int:
    """Return the devices of a replica over which a request's K and V are shared out; MLA's latent has one head."""
    heads = min(1 if a.is_mla else a.num_kv_heads for a in spec.attentions)
    return min(split.tp, heads) * split.pp * split.cp


def row_bytes(spec: ModelSpec, split: Split) -> int:
    """Return the bytes that one row's activations take at their widest: three of the hidden size, and a block's own."""
    widest = 0
    for layer in spec.layers:
        a, r, mlp = layer.attn, layer.recurrent, layer.mlp
        mixer = 0 if a is None else a.num_heads * (2 * a.head_dim + a.v_head_dim) // split.tp
        mixer += 0 if r is None else r.row_elements // split.tp
        inter = mlp.intermediate_size if mlp.moe is None else mlp.moe.top_k * mlp.moe.intermediate_size
        widest = max(widest, mixer, 3 * inter // split.tp)
    return (3 * spec.hidden_size + widest) * ACTIVATION_BYTES

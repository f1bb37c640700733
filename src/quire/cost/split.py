"""`Split`: how a model is cut over devices, and the part of each weight that one device holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

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
        formats = {name: form.wide for name, form in stored}
    is_held = precision in ("int8", "int4") or stored is not None
    dense = dense_params = expert = expert_params = head = head_params = table = 0.0
    for name, shape in weight_shapes(spec).items():
        role = role_of(spec, name)
        form = formats.get(name, PLAIN)
        size = (
            matrix_bytes(shape, "bfloat16", form) if is_held else _float_bytes(spec, name, shape, precision)
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
    """Return over how many devices a weight is cut: not at all where all heads read a low-rank projection."""
    return 1 if name.endswith(("q_a.weight", "kv_a.weight", ".f_a.weight", ".z_a.weight")) else split.tp


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

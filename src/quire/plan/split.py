"""`Split`: how a model is cut over devices, and the part of each weight that one device holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from quire.modelspec import ModelSpec, matrix_bytes, weight_shapes
from quire.weight_format import PLAIN, WeightFormat
from quire.weight_plan import plan_weights, role_of

# Bytes per weight. fp8: a block of 128 x 128 shares a scale, which is negligible. fp4: NVFP4, 16 weights share a byte.
_FLOAT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0, "fp8": 1.0, "fp4": 0.5 + 1 / 16, "mxfp4": 0.5 + 1 / 32}
PRECISIONS = (*_FLOAT_BYTES, "int8", "int4")


@dataclass(frozen=True, slots=True)
class Split:
    """Ways of parallelism. ``tp · pp · attention_dp`` devices make a replica; ``dp`` replicas.

    ``ep`` > 1: the experts of a layer lie whole on ``ep`` of the replica's devices each, tokens travel to them;
    1: every expert is cut over all. Either way a device holds the same share of their bytes.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    dp: int = 1
    attention_dp: int = 1  # ranks with their own attention over one shared set of experts

    @property
    def num_devices(self) -> int:
        return self.tp * self.pp * self.dp * self.attention_dp

    def __str__(self) -> str:
        parts = [f"{name.upper()}{n}" for name in ("tp", "pp", "ep", "dp") if (n := getattr(self, name)) > 1]
        return " ".join(parts) or "one device"


@dataclass(frozen=True, slots=True)
class Shard:
    """The bytes that the fullest device holds, and the weights that it multiplies per token."""

    dense_bytes: float  # all read in every step
    dense_params: float
    expert_bytes: float  # of all experts on the device
    expert_params: float  # that one token multiplies with, on average
    head_bytes: float  # the output matrix
    head_params: float
    table_bytes: float  # a separate embedding table, of which a token reads one row

    @property
    def weight_bytes(self) -> float:
        return self.dense_bytes + self.expert_bytes + self.head_bytes + self.table_bytes


def shard_of(spec: ModelSpec, precision: str, split: Split) -> Shard:
    """Return the part of ``spec``'s weights on one device of ``split``, held in ``precision``.

    Linears are cut over ``tp``, experts over ``tp · attention_dp``, layers over ``pp``; norms, routers and what every
    head needs of MLA are on all.
    """
    formats = _formats(spec, precision)
    dense = dense_params = expert = expert_params = head = head_params = table = 0.0
    for name, shape in weight_shapes(spec).items():
        role = role_of(spec, name)
        size = _bytes(spec, name, shape, precision, formats) / split.pp
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
            table += size * split.pp / split.tp if split.pp == 1 else 0.0
        else:
            ways = 1 if role == "other" and not name.endswith("kv_b.weight") else _ways(name, split)
            dense += size / ways
            dense_params += params / ways if len(shape) > 1 else 0.0
    return Shard(dense, dense_params, expert, expert_params, head, head_params, table)


def _ways(name: str, split: Split) -> int:
    """Whether a weight is whole on every device: MLA's low-rank inputs are, since all heads read them."""
    return 1 if name.endswith(("q_a.weight", "kv_a.weight")) else split.tp


def _formats(spec: ModelSpec, precision: str) -> Mapping[str, WeightFormat]:
    """Return the bytes of a weight as a GPU holds it."""
    text = "int4-g32" if precision == "int4" else precision
    return plan_weights(spec, {}, text, None).formats if precision in ("int8", "int4") else {}


def _bytes(
    spec: ModelSpec,
    name: str,
    shape: tuple[int, ...],
    precision: str,
    formats: Mapping[str, WeightFormat],
) -> float:
    """Return the bytes as Quire holds int8 and int4, or as checkpoints hold narrow floats: linears; bf16 elsewhere."""
    if precision in ("int8", "int4"):
        return matrix_bytes(shape, "bfloat16", formats.get(name, PLAIN))
    if role_of(spec, name) != "linear" and not name.endswith("kv_b.weight"):
        return prod(shape) * max(2.0, _FLOAT_BYTES[precision])
    return prod(shape) * _FLOAT_BYTES[precision]

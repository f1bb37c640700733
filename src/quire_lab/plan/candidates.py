"""The splits that the planner considers, and the one that ``--split`` asks for."""

from __future__ import annotations

import re
from dataclasses import replace

from quire.cost.hardware import Hardware
from quire.cost.split import Split
from quire.errors import ConfigError
from quire.modelspec import ModelSpec

AXES = ("tp", "pp", "ep", "cp", "dp")


def candidates(spec: ModelSpec, hardware: Hardware, count: int) -> list[Split]:
    """Return the splits of at most ``count`` devices to consider, those with the fewest devices per replica first.

    ``tp`` is a power of 2 that divides the query heads and stays within a domain of links; CPUs of several machines
    also exchange over the network.
    """
    heads = min(a.num_heads for a in spec.attentions)
    is_networked = hardware.kind == "cpu" and hardware.network_bandwidth is not None
    splits = []
    tp = 1
    while tp <= (count if is_networked else min(count, hardware.domain)) and heads % tp == 0:
        stages = 1
        while tp * stages <= count and stages <= spec.num_layers:
            splits.append(Split(tp=tp, pp=stages, ep=_experts(spec, tp), dp=count // (tp * stages)))
            stages *= 2
        tp *= 2
    return sorted(splits, key=lambda s: (s.tp * s.pp, s.pp))


def striped(spec: ModelSpec, hardware: Hardware, count: int) -> list[Split]:
    """Return the splits that share out K and V of a request by position, within a domain of links."""
    most = min(count, hardware.domain)
    splits = [split for split in candidates(spec, hardware, most // 2) if split.pp == 1]
    pairs = [(split, 1 << i) for split in splits for i in range(1, most.bit_length())]
    splits_by_position = [
        replace(split, cp=cp, dp=count // (split.tp * cp)) for split, cp in pairs if split.tp * cp <= most
    ]
    return sorted(splits_by_position, key=lambda s: (s.tp * s.cp, s.cp))


def _experts(spec: ModelSpec, tp: int) -> int:
    """Whether experts stay whole: each device gets at least 4 of them. Cut experts would be thin matrices."""
    moe = next((layer.mlp.moe for layer in spec.layers if layer.mlp.moe is not None), None)
    return tp if moe is not None and moe.num_experts % tp == 0 and moe.num_experts // tp >= 4 else 1


def parse_split(text: str, spec: ModelSpec, count: int) -> Split:
    """Read ``TP4,PP2`` (also EP, CP, DP) as a split of ``count`` devices; without DP, as many replicas as fit.

    Raises:
        ConfigError: names the axis, its value and what is allowed.
    """
    sizes: dict[str, int] = {}
    for part in (p for p in re.split(r"[,\s]+", text.strip()) if p):
        match = re.fullmatch(r"([a-z]+)=?(\d+)", part.lower())
        if not match or match[1] not in AXES or int(match[2]) < 1 or match[1] in sizes:
            known = ", ".join(axis.upper() for axis in AXES)
            raise ConfigError(
                f"--split {text!r}: {part!r} must be one of {known}, once, with a size: TP4,PP2"
            )
        sizes[match[1]] = int(match[2])
    split = Split(**sizes)
    ranks = replace(split, dp=1).num_devices
    if "dp" not in sizes and ranks <= count:
        split = replace(split, dp=count // ranks)
    if split.num_devices > count:
        raise ConfigError(f"--split {text!r} needs {split.num_devices} devices, and --count is {count}")
    heads = min(a.num_heads for a in spec.attentions)
    if heads % split.tp:
        raise ConfigError(f"--split {text!r}: TP{split.tp} must divide the {heads} attention heads")
    if split.pp > spec.num_layers:
        raise ConfigError(f"--split {text!r}: PP{split.pp} must be at most {spec.num_layers}, the layers")
    moe = next((layer.mlp.moe for layer in spec.layers if layer.mlp.moe is not None), None)
    if split.ep > 1 and (moe is None or split.ep != split.tp or moe.num_experts % split.ep):
        has = f"{moe.num_experts} experts" if moe else "no experts"
        raise ConfigError(
            f"--split {text!r}: EP{split.ep} must equal TP{split.tp} and divide the experts; the model has {has}"
        )
    return split

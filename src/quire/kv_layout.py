"""The layout of the KV cache: groups of layers with one rule on which blocks to keep, and blocks of one size for all.

A block holds ``block_size`` tokens of the layers of one group, and all groups take their blocks from one pool::

    block of group g:  [ layer groups[g].layers[0] | groups[g].layers[1] | … | padding ]

So the groups should have nearly equal bytes per token. Layers of one shape are divided evenly; where K and V differ
between classes of layers (Gemma 4's global layers), each class has as many layers per block as make the bytes equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import NamedTuple

KV_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}  # without scales
# Bits of K and of V in types of which each token and head has a scale.
KV_CODE_BITS = {"int8": (8, 8), "fp8": (8, 8), "int8/int4": (8, 4), "int4": (4, 4)}
CODE_GROUP = 32  # numbers of a head in 4 bits that share a step and a low
SCALE_BYTES = 4


class KvHeads(NamedTuple):
    """A layer's KV heads: how many, and the sizes of K and V. MLA has one of K alone."""

    number: int
    head_dim: int
    v_head_dim: int

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes of a token: its numbers, and scales, steps and lows where it has these."""
        sizes, bits = (self.head_dim, self.v_head_dim), KV_CODE_BITS.get(dtype)
        if bits is None:
            return self.number * sum(sizes) * KV_DTYPE_BYTES[dtype]
        codes = sum(dim * of_code // 8 for dim, of_code in zip(sizes, bits, strict=True))
        groups = sum(ceil(dim / CODE_GROUP) for dim, of_code in zip(sizes, bits, strict=True) if of_code == 4)
        return self.number * (codes + 2 * SCALE_BYTES + 2 * groups)


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share block tables. ``window`` None keeps every block, otherwise those of the last window."""

    layers: tuple[int, ...]
    window: int | None
    heads: tuple[KvHeads, ...]  # different ones of its layers

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes of a token in all layers."""
        return max(1, len(self.layers)) * max(heads.bytes_per_token(dtype) for heads in self.heads)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The groups, full attention first."""

    groups: tuple[KvGroup, ...]

    @property
    def layers_per_block(self) -> int:
        """Layers in a block of the group that has most of them; other groups may be padded."""
        return max((1, *(len(group.layers) for group in self.groups)))

    def block_bytes(self, block_size: int, dtype: str) -> int:
        """Bytes of a block: those of the group that needs most."""
        return block_size * max((group.bytes_per_token(dtype) for group in self.groups), default=0)

    def group_of_layer(self, layer: int) -> tuple[int, int]:
        """Return (group index, slot in the block) of a layer that stores K and V."""
        for g, group in enumerate(self.groups):
            if layer in group.layers:
                return g, group.layers.index(layer)
        raise AssertionError(f"layer {layer} is in no group")

    @classmethod
    def from_layers(cls, layers: Sequence[KvLayer]) -> KvLayout:
        """Divide layers into groups: classes of equal windows and sizes, each in as many groups as its blocks need."""
        if not layers:
            return cls(())
        classes: dict[tuple[int | None, int], list[KvLayer]] = {}
        for layer in layers:
            classes.setdefault((layer.window, layer.elements), []).append(layer)
        ordered = sorted(classes, key=lambda kind: (kind[0] is not None, kind[0] or 0, kind[1]))
        sizes = {kind: len(classes[kind]) for kind in ordered}
        groups = []
        for kind, per_block in _layers_per_block(sizes).items():
            members = classes[kind]
            count = ceil(len(members) / per_block)
            ends = [part * len(members) // count for part in range(count + 1)]
            heads = tuple(dict.fromkeys(member.heads for member in members))
            indices = [member.layer for member in members]
            groups += [KvGroup(tuple(indices[begin:end]), kind[0], heads) for begin, end in pairwise(ends)]
        return cls(tuple(groups))


class KvLayer(NamedTuple):
    """What one layer stores: its number, its window, numbers per token, and KV heads."""

    layer: int
    window: int | None
    elements: int
    heads: KvHeads


def _layers_per_block(sizes: dict[tuple[int | None, int], int]) -> dict[tuple[int | None, int], int]:
    """Return how many layers of each class a block has; ``sizes``: (window, numbers per token) → layers of the class.

    Of one shape: as many as the smallest class has, unless padding that class costs less than a quarter. Of several:
    what takes the fewest bytes for all layers together, and of equals the larger block.
    """
    if len({elements for _, elements in sizes}) == 1:
        least, most = min(sizes.values()), max(sizes.values())
        return dict.fromkeys(sizes, most if most < 1.25 * least else least)
    best: tuple[int, int, dict[tuple[int | None, int], int]] | None = None
    for target in {n * elements for (_, elements), count in sizes.items() for n in range(1, count + 1)}:
        counts = {kind: min(count, target // kind[1]) for kind, count in sizes.items()}
        if not all(counts.values()):
            continue
        numbers = {kind: ceil(count / counts[kind]) for kind, count in sizes.items()}
        block = max(ceil(sizes[kind] / numbers[kind]) * kind[1] for kind in sizes)
        candidate = sum(numbers.values()) * block, -block, counts
        if best is None or candidate[:2] < best[:2]:
            best = candidate
    assert best is not None
    return best[2]

"""`rotated`: which matrices are rotated before they are rounded (`kernels.rotation`), and in which blocks. Torch-free.

Integers that a file stores stay what they are. Ranks that cut the inputs of a matrix cut them between blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.modelspec import ModelSpec, weight_shapes
from quire.parallel.shard import shard
from quire.parallel.topology import Topology
from quire.weight_format import ROTATIONS, WeightFormat

Formats = Mapping[str, WeightFormat]


def rotated(spec: ModelSpec, formats: Formats, stored: Formats, tp: int = 1) -> dict[str, WeightFormat]:
    """Return ``formats`` with a rotation where a matrix is rounded on load: not held as it is ``stored``.

    A block is the largest of `ROTATIONS` that divides the inputs, and the place of every cut that ``tp`` ranks make in
    them; without one, the matrix is not rotated.
    """
    sizes = {name: {shape[-1]} for name, shape in weight_shapes(spec).items()}
    for rank in range(tp if tp > 1 else 0):
        for cut in shard(spec, Topology(tp=tp), rank, formats).cuts.values():
            if cut.columns is not None:
                sizes[cut.name] |= {cut.columns.start, cut.columns.stop}
    return {
        name: format if format == stored.get(name) else _rotated(format, sizes[name])
        for name, format in formats.items()
    }


def _rotated(format: WeightFormat, sizes: set[int]) -> WeightFormat:
    block = next((block for block in ROTATIONS if not any(size % block for size in sizes)), None)
    return replace(format, rotation=block)

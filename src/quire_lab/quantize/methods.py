"""`--method` by name: how the matrices of a layer are rounded."""

from __future__ import annotations

from quire_lab.quantize.clipping import group_grams, round_for_outputs
from quire_lab.quantize.gptq import gptq
from quire_lab.quantize.grid import Rounded
from quire_lab.quantize.rounding import round_to_nearest
from quire_lab.quantize.scaling import move_factors
from quire_lab.quantize.work import LayerWork, Results


def round_layer(method: str, work: LayerWork) -> Results:
    """Return the integers of every matrix of the layer that is quantized."""
    if method in ("awq", "smoothquant"):
        move_factors(work, smooth=method == "smoothquant")
    return {m.name: _round(method, work, m.name) for m in work.matrices if work.schemes[m.name] is not None}


def _round(method: str, work: LayerWork, name: str) -> Rounded:
    scheme, weight = work.schemes[name], work.weights[name]
    assert scheme is not None
    gram = work.gram(next(matrix for matrix in work.matrices if matrix.name == name))
    if gram is None:
        return round_to_nearest(weight, scheme, work.importance.get(name))
    if method == "gptq":
        return gptq(weight, gram, scheme)
    if method == "awq" and scheme.block is None:  # blocks of GGUF have grids that are searched input by input
        return round_for_outputs(weight, scheme, group_grams(gram, scheme.num_groups(weight.shape[1])))
    return round_to_nearest(weight, scheme, gram.diagonal())

"""Factors that move from the inputs of matrices into what makes these inputs, and change no product.

    norm         → q, k, v and gate, up     divide its weights
    rows of v    → o                        one factor for the inputs that one row of v makes, in all heads of its group
    rows of up   → down

AWQ (Lin et al. 2023) makes weights of large inputs larger, so that rounding them costs less: s = rms(x)^α. SmoothQuant
(Xiao et al. 2023) makes large inputs smaller, so that they fit int8: s = max|x|^α / max|w|^(1 − α). For each set of
matrices with common inputs α is the one that leaves the least square error of their outputs, 0 (nothing) included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quire.kernels.threads import one_torch_thread
from quire_lab.quantize.clipping import group_grams, round_for_outputs
from quire_lab.quantize.grid import Rounded, on_grid
from quire_lab.quantize.rounding import plain_grid
from quire_lab.quantize.scheme import Scheme
from quire_lab.quantize.source import Matrix
from quire_lab.quantize.work import LayerWork

Error = Callable[[LayerWork, Matrix, Tensor], float]
ALPHAS = range(11)


def move_factors(work: LayerWork, *, smooth: bool) -> None:
    """Move factors wherever they can be moved, as AWQ, or as SmoothQuant for ``smooth``."""
    error = _error_of_integers if smooth else _error_of_weights
    attn = work.spec.attn
    simple = attn is not None and not (attn.is_mla or attn.output_gate or attn.v_norm)
    value, out = work.matrix_of("attn.v"), work.matrix_of("attn.o")
    if simple and attn is not None and value is not None and out is not None and out.name in work.stats:
        heads = attn.num_kv_heads, attn.num_heads // attn.num_kv_heads, attn.v_head_dim
        scale = _best(work, [out], smooth, error, heads)
        if scale is not None:
            work.divide_outputs(value, torch.unflatten(scale, 0, heads)[:, 0].flatten())
            work.scale_inputs(out, scale)
    up, down = work.matrix_of("mlp.up"), work.matrix_of("mlp.down")
    if up is not None and down is not None and down.name in work.stats:
        scale = _best(work, [down], smooth, error)
        if scale is not None:
            work.divide_outputs(up, scale)
            work.scale_inputs(down, scale)
    for norm, part in (("attn_norm.weight", "attn.q"), ("mlp_norm.weight", "mlp.gate")):
        # Rows of a parallel layer's norm are read by attention and MLP.
        is_own = norm in work.plain and work.spec.norms != "parallel"
        readers = work.readers_of(part) if is_own else []
        scale = _best(work, readers, smooth, error) if readers else None
        if scale is not None:
            exact = work.divide_norm(norm, scale)
            for matrix in readers:
                work.scale_inputs(matrix, exact)


def _best(
    work: LayerWork, readers: Sequence[Matrix], smooth: bool, error: Error, heads: tuple[int, int, int] | None = None
) -> Tensor | None:  # fmt: skip
    """Return the factors ``[in]`` with the least error, None where none is better than 1.

    ``heads``: inputs of the heads of one group get the same factors.
    """
    stats = work.stats[readers[0].name]
    if stats.num_rows == 0:
        return None
    sizes = stats.largest if smooth else stats.gram.diagonal().sqrt()
    of_weights = torch.stack([work.weights[m.name].abs().amax(0) for m in readers]).amax(0)
    best, chosen = sum(error(work, m, torch.ones_like(sizes)) for m in readers), None
    for step in ALPHAS:
        alpha = step / ALPHAS[-1]
        scale = sizes.clamp_min(1e-5) ** alpha
        if smooth:
            scale = scale / of_weights.clamp_min(1e-5) ** (1.0 - alpha)
        if heads is not None:
            scale = torch.unflatten(scale, 0, heads).log().mean(1, keepdim=True).exp()
            scale = scale.expand(heads).flatten()
        scale = scale / (scale.max() * scale.min()).sqrt()
        scale = scale.clamp(2.0**-10, 2.0**10)
        total = sum(error(work, m, scale) for m in readers)
        if total < best:
            best, chosen = total, scale
    return chosen


def _rounded(weight: Tensor, scheme: Scheme) -> Tensor:
    """Return ``weight`` on the grid of its largest weights, which is quick."""
    grid = plain_grid(weight, scheme)
    return Rounded(scheme, on_grid(weight, scheme, grid), grid).expand()


def _error_of_weights(work: LayerWork, matrix: Matrix, scale: Tensor, *, num_sampled: int = 128) -> float:
    """Return the mean square error of the outputs, estimated from ``num_sampled``, of rows as they are."""
    weight, scheme, gram = work.weights[matrix.name], work.schemes[matrix.name], work.gram(matrix)
    assert scheme is not None
    assert gram is not None
    with one_torch_thread():  # the products are small
        part = weight[:: max(1, len(weight) // num_sampled)]
        if scheme.block is not None:
            rounded = _rounded(part * scale, scheme)
        else:
            groups = scheme.num_groups(len(scale))
            factors = torch.unflatten(scale, 0, (groups, -1))
            # The scaled weights multiply rows that are divided by the factors.
            grams = group_grams(gram, groups) / (factors.unsqueeze(1) * factors.unsqueeze(2))
            rounded = round_for_outputs(part * scale, scheme, grams).expand()
        difference = rounded.div_(scale).sub_(part)
        return (difference @ gram).mul_(difference).sum().item() * len(weight) / len(part)


def _error_of_integers(work: LayerWork, matrix: Matrix, scale: Tensor) -> float:
    """Return the square error of the outputs of some rows, which are int8 with a scale per row."""
    weight, scheme, rows = work.weights[matrix.name], work.schemes[matrix.name], work.rows(matrix)
    assert scheme is not None
    scaled = rows / scale
    step = scaled.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127.0
    integers = (scaled / step).round_() * step
    return (integers @ _rounded(weight * scale, scheme).t()).sub_(rows @ weight.t()).square_().sum().item()

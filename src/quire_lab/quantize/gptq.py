"""GPTQ (Frantar et al. 2022): integers are chosen input by input, and those still open make up for each error.

With H the mean of xᵀx over the rows that a matrix reads, and U the upper Cholesky factor of H⁻¹, rounding input i with
the error e = (w_i − ŵ_i) / U_ii changes the inputs behind it by −e · U_i,j. Inputs go in the order of falling H_ii
("act order"); grids of groups are those of the weights before, so that groups stay of consecutive inputs and any reader
of them works. Errors within a block of inputs are applied at once, those to later blocks together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.threads import one_torch_thread
from quire_lab.quantize.grid import Columns, Rounded
from quire_lab.quantize.rounding import fit_grid, round_to_nearest
from quire_lab.quantize.scheme import Scheme


def gptq(
    weight: Tensor, gram: Tensor, scheme: Scheme, *, damping: float = 0.01, block: int = 128, act_order: bool = True
) -> Rounded:  # fmt: skip
    """``weight [out, in]``, ``gram [in, in]`` → its integers; ``damping``: share of the mean of H_ii added to each.

    Inputs that are never used are rounded to nearest.
    """
    importance = gram.diagonal().clone()
    if not importance.any():
        return round_to_nearest(weight, scheme)
    grid = fit_grid(weight, scheme, importance)
    order = torch.argsort(importance, descending=True) if act_order else torch.arange(len(importance))
    factor = inverse_factor(gram[order][:, order], damping)
    columns = Columns(grid, scheme, order)
    open_ = weight[:, order].t().contiguous()  # [in, out]
    q = torch.empty_like(open_)
    for start in range(0, len(open_), block):
        stop = min(start + block, len(open_))
        errors = torch.empty(stop - start, open_.shape[1])
        # One thread: threads that wait for each other cost more than so small steps.
        with one_torch_thread():
            for i in range(start, stop):
                q[i], decoded = columns.round(i, open_[i])
                errors[i - start] = (open_[i] - decoded) / factor[i, i]
                open_[i + 1 : stop].addr_(factor[i, i + 1 : stop], errors[i - start], alpha=-1.0)
        open_[stop:].addmm_(factor[start:stop, stop:].t(), errors, alpha=-1.0)
    integers = torch.empty(weight.shape, dtype=torch.int8)
    integers[:, order] = q.t().to(torch.int8)
    return Rounded(scheme, integers, grid)


def inverse_factor(gram: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of ``gram``, damped more where it is not positive."""
    mean = gram.diagonal().mean().double()
    eye = torch.eye(len(gram), dtype=torch.float64)
    upper: Tensor
    while True:
        damped = gram.double() + eye * (mean * damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper.float()
        damping *= 10.0


def output_error(weight: Tensor, rounded: Tensor, gram: Tensor) -> float:
    """Return the mean square of (ŵ − w) x over that of w x."""
    difference = rounded - weight
    size = (weight @ gram).mul_(weight).sum().item()
    return (difference @ gram).mul_(difference).sum().item() / size if size > 0.0 else 0.0

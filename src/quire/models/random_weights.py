"""``load_format="random"``: weights from a `ModelSpec` and a seed alone, to try, test and measure without a checkpoint.

A tensor depends on its name, its shape and the seed, not on the order in which tensors are made. Norms are 1; all other
weights are normal with standard deviation 0.02. Generating every number would take ten seconds for a billion, so each
tensor is cut from an endless repetition of `POOL` random numbers, at a place that its name decides. `POOL` is prime, so
no two rows of a matrix are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from quire.modelspec import ModelSpec, weight_shapes

STD = 0.02
POOL = 4_194_301
_CPU = torch.device("cpu")


def random_weights(
    spec: ModelSpec, seed: int, dtype: torch.dtype, device: torch.device = _CPU
) -> Iterator[tuple[str, Tensor]]:
    """Yield (canonical name, tensor) in the order of `weight_shapes`: the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.empty(POOL, device="cpu").normal_(0.0, STD, generator=generator).to(device)
    pools = {torch.float32: pool, dtype: pool.to(dtype)}
    for name, shape in weight_shapes(spec).items():
        kind = stored_dtype(name, dtype)
        if _is_norm(name):
            yield name, torch.full(shape, 0.0 if spec.norm_plus_one else 1.0, dtype=kind, device=device)
        else:
            yield name, _cut(pools[kind], name, seed, shape)


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The type a weight is held in: ``dtype``, but float32 for biases that only choose experts (DeepSeek-V3)."""
    return torch.float32 if name.endswith("correction_bias") else dtype


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def _cut(pool: Tensor, name: str, seed: int, shape: tuple[int, ...]) -> Tensor:
    """Return ``shape`` numbers of the repeated pool, from the place that name and seed give."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "little") % POOL
    tensor = torch.empty(shape, dtype=pool.dtype, device=pool.device)
    flat, done = tensor.view(-1), 0
    while done < flat.numel():
        count = min(POOL - start, flat.numel() - done)
        flat[done : done + count] = pool[start : start + count]
        done, start = done + count, 0
    return tensor

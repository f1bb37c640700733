"""Muon for the matrices, AdamW for embeddings and norms.

Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"): Nesterov momentum, then the update
is replaced by the nearest semi-orthogonal matrix, found by five quintic Newton-Schulz iterations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

_NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrix: Tensor, num_iterations: int = 5) -> Tensor:
    """The semi-orthogonal matrix near ``matrix`` ([rows, cols]), in bf16 arithmetic."""
    a, b, c = _NS_COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = (x / (x.norm() + 1e-7)).bfloat16()
    for _ in range(num_iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).float()


class Muon(torch.optim.Optimizer):
    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weights = group["params"]
            for weight, update in zip(weights, self._updates(weights, group["momentum"]), strict=True):
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(
                    update, alpha=-group["lr"] * math.sqrt(max(1.0, weight.shape[0] / weight.shape[1]))
                )

    def _updates(self, weights: list[Tensor], momentum: float) -> list[Tensor]:
        """The orthogonalized updates; processes share the work and exchange the results by a sum with zeros."""
        flat = torch.zeros(sum(w.numel() for w in weights))
        updates = [
            part.view_as(w) for part, w in zip(flat.split([w.numel() for w in weights]), weights, strict=True)
        ]
        for index, (weight, update) in enumerate(zip(weights, updates, strict=True)):
            state = self.state[weight]
            if not state:
                state["momentum"] = torch.zeros_like(weight)
            buffer = state["momentum"]
            buffer.lerp_(weight.grad, 1 - momentum)
            if index % dist.get_world_size() == dist.get_rank():
                update.copy_(orthogonalize(weight.grad.lerp(buffer, momentum)))
        dist.all_reduce(flat)
        return updates


def make_optimizers(
    model: torch.nn.Module, muon_lr: float, adam_lr: float, weight_decay: float
) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        Muon(matrices, lr=muon_lr, weight_decay=weight_decay),
        torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0),
    ]

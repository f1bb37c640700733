"""Mixture of experts: which experts a token takes, and the product with them."""

from __future__ import annotations

import torch

from quire.kernels.moe import native, reference  # noqa: F401  registers both
from quire.kernels.moe.reference import ExpertStack
from quire.kernels.registry import Backend, find
from quire.modelspec import MoeSpec

__all__ = ["ExpertStack", "experts", "route"]


def route(
    router_logits: torch.Tensor,
    spec: MoeSpec,
    correction: torch.Tensor | None = None,
    *,
    backend: Backend = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 ``[num_tokens, num_experts]`` → weights fp32 and expert ids int64, both ``[num_tokens, top_k]``.

    ``correction [num_experts]`` fp32 is added to the scores for the choice alone (DeepSeek-V3, arXiv:2412.19437).
    """
    y: tuple[torch.Tensor, torch.Tensor] = find("moe.route", backend)(router_logits, spec, correction)
    return y


def experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    stack: ExpertStack,
    *,
    backend: Backend = "reference",
) -> torch.Tensor:
    """``x [num_tokens, hidden]`` → ``Σ_j weights[:, j] · down(activation(gate_up(x)))``, of the same shape.

    The j-th product of a token is by expert ``expert_ids[:, j]``. The sum is fp32, in order of j, and rounded once to
    the dtype of x.
    """
    y: torch.Tensor = find("moe.experts", backend)(x, weights, expert_ids, stack)
    return y

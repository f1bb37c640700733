"""Figures of fidelity, from rows of logits that are dropped as soon as they were compared.

    nll       −log q(t)                              of the observed token t, in nats; perplexity = exp(mean)
    KL(p‖q)   Σ p(v) · (log p(v) − log q(v))         over the full vocabulary; p: the original, q: the model
    Δp        q(t) − p(t)

Everything is float64, and what is kept per position is one number for each of these.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.errors import StepError
from quire.runner.prompt_outputs import PROMPT_NOT_FINITE

# With fewer, less than ten positions lie above the 99.9th percentile.
MIN_POSITIONS_P999 = 10_000
Floats = NDArray[np.float64]


class Compared(NamedTuple):
    """Figures of some positions, each ``[rows]``."""

    kl: Floats
    nll_original: Floats
    delta_p: Floats
    same_top1: Floats  # 1 or 0


def log_probabilities(logits: Tensor) -> Tensor:
    """Return float64 ``[rows, vocab_size]``. Raises `StepError` where a row is not finite."""
    log_probs = torch.log_softmax(logits, dim=-1, dtype=torch.float64)
    if torch.isnan(log_probs).any():
        raise StepError(PROMPT_NOT_FINITE)
    return log_probs


def of_tokens(log_probs: Tensor, token_ids: Tensor) -> Tensor:
    """``log_probs [rows, vocab_size]``, ``token_ids [rows]`` → ``[rows]``."""
    return log_probs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)


def compare(model: Tensor, original: Tensor, token_ids: Tensor) -> Compared:
    """Compare log-probabilities ``[rows, vocab_size]`` at positions whose next tokens are ``token_ids [rows]``."""
    p = original.exp()
    # A token that the original excludes adds nothing, whatever the model says of it.
    terms = torch.where(p > 0.0, p * (original - model), 0.0)
    of_original, of_model = of_tokens(original, token_ids), of_tokens(model, token_ids)
    same = original.argmax(-1) == model.argmax(-1)
    return Compared(
        terms.sum(-1).numpy(),
        -of_original.numpy(),
        (of_model.exp() - of_original.exp()).numpy(),
        same.double().numpy(),
    )


class Positions:
    """The figures of every scored position so far."""

    def __init__(self) -> None:
        self._nll: list[Floats] = []
        self._compared: list[Compared] = []

    def add(self, nll: Floats, compared: Compared | None = None) -> None:
        """Add positions with the model's ``nll [rows]``, and with what comparing them gave."""
        self._nll.append(nll)
        if compared is not None:
            self._compared.append(compared)

    def summary(self) -> dict[str, Any]:
        """Return the figures under the names of ``--json``; None where there is nothing to compute one from."""
        nll = np.concatenate(self._nll) if self._nll else np.empty(0)
        figures: dict[str, Any] = {"num_positions": len(nll)}
        figures["perplexity"], figures["perplexity_se"] = _perplexity(nll)
        parts = [np.concatenate(part) for part in zip(*self._compared, strict=True)] or [np.empty(0)] * 4
        kl, of_original, delta_p, same = parts
        figures["perplexity_original"] = _perplexity(of_original)[0]
        figures["kl_mean"], figures["kl_mean_se"] = mean_and_error(kl)
        for name, share in (("kl_median", 0.5), ("kl_p99", 0.99), ("kl_p999", 0.999)):
            enough = len(kl) >= (MIN_POSITIONS_P999 if name == "kl_p999" else 1)
            figures[name] = float(np.quantile(kl, share)) if enough else None
        figures["kl_max"] = float(kl.max()) if len(kl) else None
        figures["top1_agreement"] = float(same.mean()) if len(same) else None
        figures["delta_p_mean"] = float(delta_p.mean()) if len(delta_p) else None
        figures["delta_p_rms"] = math.sqrt(float(np.square(delta_p).mean())) if len(delta_p) else None
        return figures


def _perplexity(nll: Floats) -> tuple[float | None, float | None]:
    """Return perplexity and its standard error, to first order in that of the mean."""
    mean, error = mean_and_error(nll)
    if mean is None:
        return None, None
    perplexity = math.exp(mean) if mean < 700.0 else math.inf
    return perplexity, None if error is None else perplexity * error


def mean_and_error(values: Floats) -> tuple[float | None, float | None]:
    """Return the mean and its standard error; None where there are too few values for one."""
    if not len(values):
        return None, None
    error = None if len(values) < 2 else float(values.std(ddof=1)) / math.sqrt(len(values))
    return float(values.mean()), error

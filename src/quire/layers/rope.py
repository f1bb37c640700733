"""Rotary frequencies from a `RopeSpec`, fixed once per engine by ``max_model_len``.

Cached keys cannot be rotated again, so the kinds whose frequencies depend on the length (dynamic NTK, LongRoPE's short
and long factors) take the longest length that this engine serves. Formulas as in transformers' rope utilities:
linear (kaiokendev), dynamic NTK (bloc97, emozilla), YaRN (arXiv:2309.00071), llama3 (Llama 3.1), LongRoPE
(arXiv:2402.13753), proportional (Gemma 4).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.kernels.workspace import mapped
from quire.rope_spec import RopeSpec

_BLOCK = 1024  # positions: tables have whole blocks of them
_PIECE = 8 * _BLOCK  # positions computed at a time: 4 ms for heads of 64


class RopeTable:
    """cos and sin of every position of an engine, each ``[max_positions, dim / 2]`` fp32, times the attention factor.

    The tables do not move, so that a recorded step may read them. On demand they have their values only as far as
    `cover` was called; what lies beyond is not written and takes no memory. That is for a CPU alone.
    """

    def __init__(
        self,
        spec: RopeSpec,
        max_model_len: int,
        *,
        on_demand: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """``dtype``: of queries, and of the factors by which they are multiplied."""
        max_positions = (
            -(-max_model_len // _BLOCK) + 1
        ) * _BLOCK  # a block more: drafts may lie beyond the end
        with torch.device("cpu"):  # angles of every device are the CPU's
            self._frequencies, self._factor = inverse_frequencies(spec, max_model_len), spec.attention_factor
            self.cos, self.sin = (mapped(max_positions, spec.dim // 2, dtype=torch.float32) for _ in range(2))
            factors: tuple[Tensor, ...] = ()
            if spec.query_scale is not None:
                factors = (query_factors(*spec.query_scale, max_positions, dtype),)
        self.num_positions = max_positions
        self.num_covered = 0  # positions that have their values
        if not on_demand:
            self.cover()
            device = torch.get_default_device()
            self.cos, self.sin = self.cos.to(device), self.sin.to(device)
            factors = tuple(factor.to(device) for factor in factors)
        # cos, sin, and where queries are multiplied, their factors: what a layer gets the rows of.
        self.tables: tuple[Tensor, ...] = (self.cos, self.sin, *factors)

    def cover(self, num_positions: int | None = None) -> None:
        """Compute the positions below ``num_positions``, None: all. Call it from one thread, before what reads them."""
        most = self.num_positions
        num_positions = most if num_positions is None else num_positions
        while self.num_covered < num_positions:
            start, stop = self.num_covered, min(self.num_covered + _PIECE, most)
            assert start < stop, (num_positions, most)
            with torch.device("cpu"):
                positions = torch.arange(start, stop, dtype=torch.float32)
                angles = positions.unsqueeze(1) * self._frequencies
                self.cos[start:stop] = angles.cos().mul_(self._factor)
                self.sin[start:stop] = angles.sin_().mul_(self._factor)
            self.num_covered = stop

    def extend(self, num_rows: int) -> None:
        """Have ``num_rows`` rows behind the positions at least, for what is put together of theirs. For a CPU alone."""
        if len(self.cos) >= self.num_positions + num_rows:
            return
        old = self.tables
        assert len(old) == 2, "queries of such rows have no factors"
        self.cos, self.sin = (mapped(self.num_positions + num_rows, t.shape[1], dtype=t.dtype) for t in old)
        self.tables = self.cos, self.sin
        for table, before in zip(self.tables, old, strict=True):
            table[: self.num_covered] = before[: self.num_covered]


def query_factors(beta: float, length: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return ``[count, 1]``: 1 + beta · ln(1 + ⌊position / length⌋), the factors of queries (Llama 4)."""
    return (1.0 + beta * torch.log(1.0 + torch.arange(count) // length)).to(dtype).unsqueeze(1)


def inverse_frequencies(spec: RopeSpec, max_model_len: int) -> Tensor:
    """Return fp32 ``[dim / 2]``: the angle per position of each pair."""
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.int64).float() / spec.dim
    if spec.kind == "dynamic":
        return 1.0 / (_dynamic_theta(spec, max_model_len) ** exponents)
    if spec.kind == "longrope":
        factors = spec.long_factor if max_model_len > spec.original_max_position else spec.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * spec.theta**exponents)
    plain = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, exponents)
    if spec.kind == "proportional":  # Gemma 4: the first pairs turn, spread over all dimensions
        turning = int(spec.part * spec.dim // 2)
        return torch.cat((plain[:turning], torch.zeros(spec.dim // 2 - turning))) / spec.factor
    assert spec.kind == "default", spec.kind
    return plain


def _dynamic_theta(spec: RopeSpec, max_model_len: int) -> float:
    length = max(max_model_len, spec.original_max_position)
    stretch = spec.factor * length / spec.original_max_position - (spec.factor - 1.0)
    return float(spec.theta * stretch ** (spec.dim / (spec.dim - 2)))


def _llama3(spec: RopeSpec, plain: Tensor) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended."""
    length = spec.original_max_position
    wavelength = 2.0 * math.pi / plain
    smooth = (length / wavelength - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1.0 - smooth) * plain / spec.factor + smooth * plain
    stretched = torch.where(wavelength > length / spec.low_freq_factor, plain / spec.factor, blended)
    return torch.where(wavelength < length / spec.high_freq_factor, plain, stretched)


def _yarn(spec: RopeSpec, exponents: Tensor) -> Tensor:
    """Interpolate the slow dimensions, keep the fast ones, with a ramp between (YaRN, §3.2)."""

    def dimension(rotations: float) -> float:
        turns = spec.original_max_position / (rotations * 2.0 * math.pi)
        return spec.dim * math.log(turns) / (2.0 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    frequencies = spec.theta**exponents
    return ramp / (spec.factor * frequencies) + (1.0 - ramp) / frequencies

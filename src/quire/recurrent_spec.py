"""`RecurrentSpec`: a layer that keeps a state of fixed size per sequence instead of keys and values per token.

What its weights are called and which shapes they have is in `quire.recurrent_weights`. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

STATE_ITEM_BYTES = 4  # states are fp32, whatever the model's dtype
Kind = Literal["gated_delta", "channel_delta", "mamba2", "short_conv"]


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """What models with Mamba-2's scan differ in."""

    norm: Literal["none", "gate_first", "norm_first"]  # norm(y · silu(z)), or norm(y) · silu(z)
    step_limits: tuple[float, float]  # clamps softplus(dt + dt_bias)
    scales: tuple[float, float, float, float, float]  # factors on z, x, B, C and dt


@dataclass(frozen=True, slots=True)
class ChannelGateSpec:
    """What models whose delta rule has a decay per channel of the key differ in."""

    # Columns between the two projections of the decay, and of the output's gate; 0: there is one projection each.
    rank: int
    # The least logarithm of a decay, which a sigmoid then bounds; None: a softplus gives it.
    floor: float | None


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A recurrent token mixer. "mamba2": key heads are the groups of B and C. "short_conv" has no heads."""

    kind: Kind
    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_kernel: int  # taps of the convolution, that of the current token included
    conv_channels: int  # columns that the convolution reads
    conv_bias: bool = False
    bias: bool = False  # whether the projections have one
    mamba: MambaSpec | None = None
    gate: ChannelGateSpec | None = None

    def __post_init__(self) -> None:
        assert (self.mamba is not None) == (self.kind == "mamba2"), self.kind
        assert (self.gate is not None) == (self.kind == "channel_delta"), self.kind
        assert self.gate is None or self.num_k_heads == self.num_v_heads, self
        if self.num_k_heads:
            assert self.num_v_heads % self.num_k_heads == 0, (self.num_v_heads, self.num_k_heads)
            assert self.conv_channels == 2 * self.k_width + self.v_width, self.conv_channels

    @property
    def k_width(self) -> int:
        """Columns of q, and of k, of one token."""
        return self.num_k_heads * self.k_head_dim

    @property
    def v_width(self) -> int:
        """Columns of v, of its gate and of the output, of one token."""
        return self.num_v_heads * self.v_head_dim if self.num_v_heads else self.conv_channels

    @property
    def state_elements(self) -> int:
        """Numbers of the recurrent state of one sequence: ``[num_v_heads, k_head_dim, v_head_dim]``."""
        return self.num_v_heads * self.k_head_dim * self.v_head_dim

    @property
    def conv_elements(self) -> int:
        """Numbers of the convolution's past of one sequence: ``[conv_channels, conv_kernel − 1]``."""
        return self.conv_channels * (self.conv_kernel - 1)

    @property
    def state_bytes(self) -> int:
        """Bytes of both of one sequence."""
        return (self.state_elements + self.conv_elements) * STATE_ITEM_BYTES

    @property
    def row_elements(self) -> int:
        """Numbers of one token between the projections."""
        decays = self.num_v_heads if self.gate is None else self.k_width + 2 * self.gate.rank
        return self.conv_channels + 2 * self.v_width + self.num_v_heads + decays

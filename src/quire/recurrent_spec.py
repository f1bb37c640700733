"""`RecurrentSpec`: a layer that keeps a state of fixed size per sequence instead of keys and values per token.

Gated delta rule (Yang et al. 2024, arXiv:2412.06464) behind a causal short convolution, as in Qwen3-Next and Qwen3.5.
Canonical names after ``layers.{i}.``, beside the norms and the MLP that every layer has (`quire.modelspec`):

    delta.{q,k}.weight [num_k_heads · k_head_dim, hidden]     delta.{v,z}.weight [num_v_heads · v_head_dim, hidden]
    delta.{a,b}.weight [num_v_heads, hidden]                  delta.{rate,dt_bias} [num_v_heads]
    delta.conv_{q,k,v}.weight [rows of q, k or v, conv_kernel]
    delta.norm.weight [v_head_dim]                            delta.o.weight [hidden, num_v_heads · v_head_dim]

``rate`` is −exp(A_log). Value head h reads key head ``h // (num_v_heads / num_k_heads)``. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

STATE_ITEM_BYTES = 4  # states are fp32, whatever the model's dtype


@dataclass(frozen=True, slots=True)
class RecurrentSpec:
    """A recurrent token mixer."""

    kind: Literal["gated_delta"]
    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_kernel: int  # taps of the convolution, that of the current token included
    conv_channels: int  # rows of q, k and v, which the convolution reads

    def __post_init__(self) -> None:
        assert self.num_v_heads % self.num_k_heads == 0, (self.num_v_heads, self.num_k_heads)
        assert self.conv_channels == 2 * self.k_width + self.v_width, self.conv_channels

    @property
    def k_width(self) -> int:
        """Columns of q, and of k, of one token."""
        return self.num_k_heads * self.k_head_dim

    @property
    def v_width(self) -> int:
        """Columns of v, of its gate and of the output, of one token."""
        return self.num_v_heads * self.v_head_dim

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
        return self.conv_channels + 2 * self.v_width + 2 * self.num_v_heads

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Name after "layers.{i}." → shape of every weight, in a model of that hidden size."""
        rows = {"q": self.k_width, "k": self.k_width, "v": self.v_width}
        widths = rows | {"z": self.v_width, "b": self.num_v_heads, "a": self.num_v_heads}
        shapes: dict[str, tuple[int, ...]] = {
            f"delta.{n}.weight": (width, hidden) for n, width in widths.items()
        }
        shapes |= {f"delta.conv_{n}.weight": (width, self.conv_kernel) for n, width in rows.items()}
        shapes |= {"delta.rate": (self.num_v_heads,), "delta.dt_bias": (self.num_v_heads,)}
        return shapes | {"delta.norm.weight": (self.v_head_dim,), "delta.o.weight": (hidden, self.v_width)}

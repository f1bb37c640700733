"""A layer with the gated delta rule: projections, short convolution, recurrence, gated norm, output projection."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.lora import AdapterRows
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.recurrent import causal_conv, delta_inputs, gated_delta_rule, gated_norm
from quire.kernels.state_pool import StateBatch, StateView
from quire.layers.attention import CosSin
from quire.layers.recurrent_mixer import RecurrentMixer
from quire.layers.weights import Build, WeightLoader, copy_into
from quire.recurrent_spec import RecurrentSpec


class DeltaNet(RecurrentMixer):
    """The recurrent mixer of one layer (arXiv:2412.06464, §3.4)."""

    def __init__(self, spec: RecurrentSpec, hidden_size: int, build: Build) -> None:
        super().__init__(spec, hidden_size, build, spec.v_width)
        self._spec, self._eps = spec, build.eps
        self._rate, self._dt_bias = torch.zeros(spec.num_v_heads), torch.zeros(spec.num_v_heads)
        self._norm = torch.zeros(spec.v_head_dim)
        self._causal_conv, self._inputs = build.of(causal_conv), build.of(delta_inputs)
        self._rule, self._gated_norm = build.of(gated_delta_rule), build.of(gated_norm)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        loaders = super().weight_loaders()
        loaders |= {"rate": copy_into(self._rate), "dt_bias": copy_into(self._dt_bias)}
        loaders["norm.weight"] = copy_into(self._norm)
        return loaders

    def __call__(
        self, x: Tensor | QuantizedRows, cos_sin: CosSin | None, batch: StateBatch, view: StateView,
        adapters: AdapterRows | None = None,
    ) -> Tensor:  # fmt: skip
        """``x [num_tokens, hidden_size]`` → the same shape; the states in ``view`` go on by the tokens of ``batch``.

        Called as `Attention` is; a recurrence needs no ``cos_sin``.
        """
        spec = self._spec
        rows = self._in(x, adapters)
        channels, width, heads = spec.conv_channels, spec.v_width, spec.num_v_heads
        z = rows[:, channels : channels + width]
        b = rows[:, channels + width : channels + width + heads]
        a = rows[:, channels + width + heads :]
        qkv = self._causal_conv(rows[:, :channels], self._taps.weight, view, batch)
        qk, gates = self._inputs(qkv, a, b, self._rate, self._dt_bias, spec.num_k_heads, spec.k_head_dim)
        y = self._rule(qk, qkv[:, 2 * spec.k_width :], gates, view, batch)
        return self._o(self._gated_norm(y, z, self._norm, self._eps), adapters)

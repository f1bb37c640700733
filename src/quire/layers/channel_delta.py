"""A layer of the delta rule with a decay per channel of the key (Kimi Delta Attention, arXiv:2510.26692, §4)."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.lora import AdapterRows
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.recurrent import causal_conv, gated_norm
from quire.kernels.recurrent.channel_delta import channel_delta_rule, channel_inputs
from quire.kernels.state_pool import StateBatch, StateView
from quire.layers.attention import CosSin
from quire.layers.linear import Linear
from quire.layers.recurrent_mixer import RecurrentMixer
from quire.layers.weights import Build, WeightLoader, copy_into
from quire.recurrent_spec import RecurrentSpec
from quire.recurrent_weights import second_widths


class ChannelDelta(RecurrentMixer):
    """The recurrent mixer of one layer. The decays and the output's gate may go through few columns (``gate.rank``)."""

    def __init__(self, spec: RecurrentSpec, hidden_size: int, build: Build) -> None:
        super().__init__(spec, hidden_size, build, spec.v_width)
        assert spec.gate is not None
        self._spec, self._gate, self._eps = spec, spec.gate, build.eps
        self._rate, self._dt_bias = torch.zeros(spec.num_v_heads), torch.zeros(spec.k_width)
        self._norm = torch.zeros(spec.v_head_dim)
        rank = spec.gate.rank
        self._second = {
            name: Linear({name: width}, rank, build) for name, width in second_widths(spec).items()
        }
        self._causal_conv, self._inputs = build.of(causal_conv), build.of(channel_inputs)
        self._rule, self._gated_norm = build.of(channel_delta_rule), build.of(gated_norm)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        loaders = super().weight_loaders()
        for linear in self._second.values():
            loaders |= linear.weight_loaders()
        loaders |= {"rate": copy_into(self._rate), "dt_bias": copy_into(self._dt_bias)}
        loaders["norm.weight"] = copy_into(self._norm)
        return loaders

    def linears(self) -> tuple[Linear, ...]:
        """Return the linears that an adapter may change."""
        return self._in, *self._second.values(), self._o

    def __call__(
        self, x: Tensor | QuantizedRows, cos_sin: CosSin | None, batch: StateBatch, view: StateView,
        adapters: AdapterRows | None = None,
    ) -> Tensor:  # fmt: skip
        """As of `DeltaNet`."""
        spec, rank = self._spec, self._gate.rank
        rows = self._in(x, adapters)
        channels = spec.conv_channels
        z_width, f_width = (rank, rank) if rank else (spec.v_width, spec.k_width)
        z = rows[:, channels : channels + z_width]
        f = rows[:, channels + z_width : channels + z_width + f_width]
        b = rows[:, channels + z_width + f_width :]
        if rank:
            f, z = self._second["f_b"](f, adapters), self._second["z_b"](z, adapters)
        qkv = self._causal_conv(rows[:, :channels], self._taps.weight, view, batch)
        qkd, beta = self._inputs(qkv, f, b, self._rate, self._dt_bias, spec.k_head_dim, self._gate.floor)
        y = self._rule(qkd, qkv[:, 2 * spec.k_width :], beta, view, batch)
        return self._o(self._gated_norm(y, z, self._norm, self._eps, is_plain=True), adapters)

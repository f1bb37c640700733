"""Recurrent mixers: which class a `RecurrentSpec` is run by, and the gated short convolution (LFM2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

import quire.kernels.recurrent.native  # noqa: F401  (registers the ops)
from quire.kernels.lora import AdapterRows
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.recurrent import gated_conv
from quire.kernels.state_pool import StateBatch, StateView
from quire.layers.attention import CosSin
from quire.layers.channel_delta import ChannelDelta
from quire.layers.delta_net import DeltaNet
from quire.layers.mamba import Mamba
from quire.layers.recurrent_mixer import RecurrentMixer
from quire.layers.weights import Build
from quire.recurrent_spec import Kind, RecurrentSpec
from quire.recurrent_weights import prefix_of


class ShortConv(RecurrentMixer):
    """The mixer of LFM2's other layers: ``o(c · conv(b · x))``."""

    def __init__(self, spec: RecurrentSpec, hidden_size: int, build: Build) -> None:
        super().__init__(spec, hidden_size, build, spec.conv_channels)
        self._convolve = build.of(gated_conv)

    def __call__(
        self, x: Tensor | QuantizedRows, cos_sin: CosSin | None, batch: StateBatch, view: StateView,
        adapters: AdapterRows | None = None,
    ) -> Tensor:  # fmt: skip
        """As of `DeltaNet`."""
        rows = self._in(x, adapters)
        return self._o(self._convolve(rows, self._taps.weight, view, batch, self._taps.bias), adapters)


_MIXERS: Mapping[Kind, Callable[[RecurrentSpec, int, Build], Any]] = {
    "gated_delta": DeltaNet,
    "channel_delta": ChannelDelta,
    "mamba2": Mamba,
    "short_conv": ShortConv,
}


def mixer_of(spec: RecurrentSpec) -> tuple[Callable[[RecurrentSpec, int, Build], Any], str]:
    """Return what runs a layer, which is called as `Attention` is, and what the names of its weights begin with."""
    return _MIXERS[spec.kind], prefix_of(spec)

"""A layer with Mamba-2's scan: projections, short convolution, recurrence, gated norm, output projection."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.lora import AdapterRows
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.recurrent import causal_conv
from quire.kernels.recurrent.mamba import group_norm, mamba_inputs, mamba_scan
from quire.kernels.state_pool import StateBatch, StateView
from quire.layers.attention import CosSin
from quire.layers.recurrent_mixer import RecurrentMixer
from quire.layers.weights import Build, WeightLoader, copy_into
from quire.recurrent_spec import RecurrentSpec


class Mamba(RecurrentMixer):
    """The recurrent mixer of one layer (arXiv:2405.21060, §7). Over the tp axis each rank has all of it."""

    def __init__(self, spec: RecurrentSpec, hidden_size: int, build: Build) -> None:
        super().__init__(spec, hidden_size, build, spec.v_width, whole=True)
        assert spec.mamba is not None
        self._spec, self._mamba, self._eps = spec, spec.mamba, build.eps
        self._rate, self._dt_bias, self._skip = torch.zeros(3, spec.num_v_heads).unbind()
        self._norm = torch.zeros(spec.v_width) if spec.mamba.norm != "none" else None
        self._causal_conv, self._inputs = build.of(causal_conv), build.of(mamba_inputs)
        self._scan, self._group_norm = build.of(mamba_scan), build.of(group_norm)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        # The convolution is linear in each channel, so factors on its input are factors on its taps, which are fp32.
        scales = dict(zip(("conv_x", "conv_b", "conv_c"), self._mamba.scales[1:4], strict=True))
        loaders = super().weight_loaders() | self._taps.weight_loaders(scales)
        loaders |= {
            "rate": copy_into(self._rate),
            "dt_bias": copy_into(self._dt_bias),
            "skip": copy_into(self._skip),
        }
        if self._norm is not None:
            loaders["norm.weight"] = copy_into(self._norm)
        return loaders

    def __call__(
        self, x: Tensor | QuantizedRows, cos_sin: CosSin | None, batch: StateBatch, view: StateView,
        adapters: AdapterRows | None = None,
    ) -> Tensor:  # fmt: skip
        """As of `DeltaNet`."""
        spec, mamba, width = self._spec, self._mamba, self._spec.v_width
        rows = self._in(x, adapters)
        z, conv_in, dt = rows[:, :width], rows[:, width : -spec.num_v_heads], rows[:, -spec.num_v_heads :]
        xbc = self._causal_conv(conv_in, self._taps.weight, view, batch, self._taps.bias)
        cb, gates = self._inputs(
            xbc,
            dt,
            self._rate,
            self._dt_bias,
            spec.num_k_heads,
            spec.k_head_dim,
            mamba.scales[4],
            mamba.step_limits,
        )
        y = self._scan(cb, xbc[:, :width], gates, self._skip, view, batch)
        y = self._group_norm(
            y,
            z,
            self._norm,
            spec.num_k_heads,
            self._eps,
            gate_first=mamba.norm == "gate_first",
            scale=mamba.scales[0],
        )
        return self._o(y, adapters)

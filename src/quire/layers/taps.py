"""`Taps`: the weights of a recurrent layer's convolution, fp32, as the kernels read them."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.layers.weights import WeightLoader, copy_into
from quire.quant.stored import Weight
from quire.recurrent_spec import RecurrentSpec
from quire.recurrent_weights import conv_rows


class Taps:
    """``weight [conv_kernel, conv_channels]``, oldest token first, and ``bias [conv_channels]`` or None."""

    def __init__(self, spec: RecurrentSpec) -> None:
        self._parts = conv_rows(spec)
        self.weight = torch.zeros(spec.conv_kernel, spec.conv_channels)
        self.bias = torch.zeros(spec.conv_channels) if spec.conv_bias else None

    def weight_loaders(self, scales: dict[str, float] | None = None) -> dict[str, WeightLoader]:
        """Return the loaders of each part; ``scales``: factors on what the parts of the convolution read."""
        loaders: dict[str, WeightLoader] = {}
        start = 0
        for name, width in self._parts.items():
            stop = start + width
            loaders[f"{name}.weight"] = _transposed_into(
                self.weight[:, start:stop], (scales or {}).get(name, 1.0)
            )
            if self.bias is not None:
                loaders[f"{name}.bias"] = copy_into(self.bias[start:stop])
            start = stop
        return loaders


def _transposed_into(target: Tensor, scale: float) -> WeightLoader:
    def load(weight: Weight) -> None:
        assert isinstance(weight, Tensor)
        target.copy_(weight.t())
        target.mul_(scale)

    return load

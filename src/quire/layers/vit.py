"""Layers of vision transformers: every patch of an image sees every other one, and norms have a mean and a bias.

One image is one call, so the bits of its rows depend on its pixels alone, whatever else its step computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from quire.errors import UnsupportedModelError
from quire.layers.linear import Linear
from quire.layers.weights import Build, WeightLoader, copy_into, prefixed

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
}


def activation_of(name: str) -> Callable[[Tensor], Tensor]:
    """Return the activation that transformers calls ``name``. Raises `UnsupportedModelError`."""
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"vision_config: hidden_act = {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}."
        )
    return ACTIVATIONS[name]


class LayerNorm:
    """Layer norm with weight and bias, which are held in fp32; it computes in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        self.weight, self.bias, self.eps = torch.zeros(size), torch.zeros(size), eps

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return {"weight": copy_into(self.weight), "bias": copy_into(self.bias)}

    def __call__(self, x: Tensor) -> Tensor:
        """``[num_patches, size]`` → the same shape and dtype."""
        y = functional.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps)
        return y.to(x.dtype)


class PatchAttention:
    """Attention of patches that are turned by their places; q, k and v are one matrix in the checkpoint."""

    def __init__(self, hidden_size: int, num_heads: int, build: Build) -> None:
        self._num_heads = num_heads
        self._qkv = Linear({"qkv": 3 * hidden_size}, hidden_size, build, bias=True)
        self._out = Linear({"proj": hidden_size}, hidden_size, build, bias=True)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return {**self._qkv.weight_loaders(), **self._out.weight_loaders()}

    def __call__(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], windows: Sequence[int] = ()) -> Tensor:
        """``[num_patches, hidden_size]`` → the same shape. ``cos_sin``: each ``[num_patches, head_dim]``.

        ``windows``: the patches in each; one sees those of its window alone. Empty: it sees all.
        """
        num_patches = x.shape[0]
        q, k, v = self._qkv(x).view(num_patches, 3, self._num_heads, -1).unbind(1)
        cos, sin = (part.unsqueeze(1) for part in cos_sin)
        heads = [
            part.transpose(0, 1).unsqueeze(0) for part in (_turned(q, cos, sin), _turned(k, cos, sin), v)
        ]
        sizes = list(windows or (num_patches,))
        parts = zip(*(torch.split(part, sizes, dim=2) for part in heads), strict=True)
        y = torch.cat([functional.scaled_dot_product_attention(*qkv) for qkv in parts], dim=2)
        return self._out(y[0].transpose(0, 1).reshape(num_patches, -1))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return ``x [num_patches, num_heads, head_dim]`` turned by angles ``[num_patches, 1, head_dim]``, in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return (x.float() * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class VitLayer:
    """Attention of all patches to all, and an MLP without a gate, each after its norm."""

    def __init__(self, hidden_size: int, num_heads: int, inter: int, activation: str, build: Build) -> None:
        self._num_heads = num_heads
        self._norms = LayerNorm(hidden_size, build.eps), LayerNorm(hidden_size, build.eps)
        self._qkv = Linear(dict.fromkeys(("q", "k", "v"), hidden_size), hidden_size, build, bias=True)
        self._out = Linear({"out": hidden_size}, hidden_size, build, bias=True)
        self._up = Linear({"fc1": inter}, hidden_size, build, bias=True)
        self._down = Linear({"fc2": hidden_size}, inter, build, bias=True)
        self._activation = activation_of(activation)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Return the loaders under the names of SigLIP's checkpoints."""
        attention = {**self._qkv.weight_loaders(), **self._out.weight_loaders()}
        return {
            **prefixed("layer_norm1.", self._norms[0].weight_loaders()),
            **prefixed("layer_norm2.", self._norms[1].weight_loaders()),
            **{f"self_attn.{name.replace('.', '_proj.')}": load for name, load in attention.items()},
            **prefixed("mlp.", {**self._up.weight_loaders(), **self._down.weight_loaders()}),
        }

    def __call__(self, x: Tensor) -> Tensor:
        """``[num_patches, hidden_size]`` → the same shape."""
        x = x + self._out(self._attend(self._qkv(self._norms[0](x))))
        return x + self._down(self._activation(self._up(self._norms[1](x))))

    def _attend(self, qkv: Tensor) -> Tensor:
        """``[num_patches, 3 · hidden_size]`` → ``[num_patches, hidden_size]``."""
        num_patches = qkv.shape[0]
        heads = qkv.view(num_patches, 3, self._num_heads, -1).permute(1, 2, 0, 3)  # [3, heads, patches, dim]
        q, k, v = (part.unsqueeze(0) for part in heads)
        y = functional.scaled_dot_product_attention(q, k, v)
        return y[0].transpose(0, 1).reshape(num_patches, -1)

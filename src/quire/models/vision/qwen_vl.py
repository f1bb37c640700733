"""The encoders of Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL (arXiv:2511.21631).

    pixels [3, h, w] → patches [n, 6 · p²] → layers [n, hidden] → groups of 2 × 2 [n / 4, 4 · hidden] → [n / 4, text]

Patches lie group by group. A patch is turned by its row and its column. Qwen2.5-VL's layers see windows of groups, but
for some that see all; Qwen3-VL's has learned positions too, and some layers give rows for the decoder's first layers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from quire.families.vision_qwen_vl import FRAMES
from quire.layers.linear import Linear
from quire.layers.norm import RmsNorm
from quire.layers.vit import LayerNorm, PatchAttention, activation_of
from quire.layers.weights import Build, WeightLoader, copy_into, prefixed
from quire.models.vision.pixels import flattened, pixel_values
from quire.spans import Span
from quire.vision_spec import VisionSpec


class Encoder:
    """One image → the rows that its tokens have in place of embeddings, and of those for the layers after it."""

    def __init__(self, spec: VisionSpec, build: Build) -> None:
        self._spec, self._dtype = spec, build.dtype
        hidden, patch = spec.hidden_size, spec.patch_size
        has_bias = spec.num_positions > 0
        self._patches = Linear({"patches": hidden}, 3 * FRAMES * patch * patch, build, bias=has_bias)
        self._positions = torch.zeros(spec.num_positions, hidden, dtype=build.dtype)
        self._layers = [QwenVitLayer(spec, build) for _ in range(spec.num_layers)]
        self._merger = Merger(spec, build)
        self._deepstack = [Merger(spec, build, norm_after=True) for _ in spec.deepstack]
        pairs = hidden // spec.num_heads // 4
        self._frequencies = 1.0 / (spec.theta ** (torch.arange(pairs, dtype=torch.float32) / pairs))
        self._values = pixel_values(spec)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        """Return a loader for each tensor, under its name in checkpoints."""
        patches = self._patches.weight_loaders()
        loaders = {"patch_embed.proj.weight": flattened(patches["patches.weight"])}
        if self._spec.num_positions:
            loaders |= {
                "patch_embed.proj.bias": patches["patches.bias"],
                "pos_embed.weight": copy_into(self._positions),
            }
        for index, layer in enumerate(self._layers):
            loaders |= prefixed(f"blocks.{index}.", layer.weight_loaders())
        loaders |= prefixed("merger.", self._merger.weight_loaders())
        for index, merger in enumerate(self._deepstack):
            loaders |= prefixed(f"deepstack_merger_list.{index}.", merger.weight_loaders())
        return prefixed("visual.", loaders)

    def __call__(self, span: Span) -> Tensor:
        """Return ``[span.length, (1 + number of deepstack layers) · text_hidden_size]``."""
        spec = self._spec
        rows, columns = (edge // spec.patch_size for edge in span.grid)
        x = self._patches(self._patches_of(span, rows, columns))
        at = grouped(rows, columns, spec.merge)  # [num_patches, 2]: row, column
        if spec.num_positions:
            x = x + self._learned(at, rows, columns)
        angles = (at.float().unsqueeze(2) * self._frequencies).flatten(1)  # [num_patches, head_dim / 2]
        cos, sin = (torch.cat((part, part), dim=1) for part in (angles.cos(), angles.sin()))
        order, windows = self._windows(rows, columns)
        if order is not None:
            x, cos, sin = (part[order] for part in (x, cos, sin))
        deep = []
        for index, layer in enumerate(self._layers):
            x = layer(x, (cos, sin), () if index in spec.whole_layers else windows)
            if index in spec.deepstack:
                deep.append(self._deepstack[spec.deepstack.index(index)](x))
        merged = self._merger(x)
        if order is not None:
            groups = order.view(-1, spec.merge**2)[:, 0] // spec.merge**2
            merged = torch.empty_like(merged).index_copy_(0, groups, merged)
        return torch.cat((merged, *deep), dim=1)

    def _patches_of(self, span: Span, rows: int, columns: int) -> Tensor:
        """Return the patches of both frames, group by group: ``[num_patches, 3 · 2 · patch²]``."""
        patch, merge = self._spec.patch_size, self._spec.merge
        pixels = np.frombuffer(span.data, np.uint8).reshape(3, *span.grid)
        values = np.stack([table[channel] for table, channel in zip(self._values, pixels, strict=True)])
        cut = torch.from_numpy(values).to(self._dtype)
        cut = cut.view(3, rows // merge, merge, patch, columns // merge, merge, patch)
        cut = cut.permute(1, 4, 2, 5, 0, 3, 6).unsqueeze(
            5
        )  # [rows, columns, 2, 2, channel, frame, patch, patch]
        return cut.expand(*cut.shape[:5], FRAMES, patch, patch).reshape(rows * columns, -1)

    def _learned(self, at: Tensor, rows: int, columns: int) -> Tensor:
        """Return the learned positions, of a square, at each patch: between four of them."""
        side = int(self._spec.num_positions**0.5)
        total = None
        taps = [_taps(at[:, axis], size, side) for axis, size in enumerate((rows, columns))]
        for row, row_weight in taps[0]:
            for column, column_weight in taps[1]:
                part = self._positions[row * side + column] * (row_weight * column_weight).unsqueeze(1)
                total = part if total is None else total + part
        assert total is not None
        return total.to(self._dtype)

    def _windows(self, rows: int, columns: int) -> tuple[Tensor | None, tuple[int, ...]]:
        """Return the patches window by window, and how many each window has; (None, ()) without windows."""
        spec = self._spec
        if not spec.window:
            return None, ()
        rows, columns, edge = rows // spec.merge, columns // spec.merge, spec.window
        groups = torch.arange(rows * columns).view(rows, columns)
        windows = [
            groups[row : row + edge, column : column + edge].flatten()
            for row in range(0, rows, edge)
            for column in range(0, columns, edge)
        ]
        unit = spec.merge**2
        order = (torch.cat(windows).unsqueeze(1) * unit + torch.arange(unit)).flatten()
        return order, tuple(len(window) * unit for window in windows)


class QwenVitLayer:
    """Attention of patches that are turned by their places, and an MLP, each after its norm."""

    def __init__(self, spec: VisionSpec, build: Build) -> None:
        hidden, inter = spec.hidden_size, spec.intermediate_size
        self._norms = vision_norm(spec, hidden, build), vision_norm(spec, hidden, build)
        self._attention = PatchAttention(hidden, spec.num_heads, build)
        self._is_gated = spec.gated
        names = ("gate_proj", "up_proj") if spec.gated else ("linear_fc1",)
        self._up = Linear(dict.fromkeys(names, inter), hidden, build, bias=True)
        self._down = Linear({"down_proj" if spec.gated else "linear_fc2": hidden}, inter, build, bias=True)
        self._activation = activation_of(spec.activation)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return {
            **prefixed("norm1.", self._norms[0].weight_loaders()),
            **prefixed("norm2.", self._norms[1].weight_loaders()),
            **prefixed("attn.", self._attention.weight_loaders()),
            **prefixed("mlp.", {**self._up.weight_loaders(), **self._down.weight_loaders()}),
        }

    def __call__(self, x: Tensor, cos_sin: tuple[Tensor, Tensor], windows: tuple[int, ...]) -> Tensor:
        """``[num_patches, hidden_size]`` → the same shape. ``windows``: as of `PatchAttention`."""
        x = x + self._attention(self._norms[0](x), cos_sin, windows)
        up = self._up(self._norms[1](x))
        if self._is_gated:
            gate, up = up.chunk(2, dim=1)
            return x + self._down((self._activation(gate) * up).contiguous())
        return x + self._down(self._activation(up))


class Merger:
    """A group of patches → one row of the decoder."""

    def __init__(self, spec: VisionSpec, build: Build, *, norm_after: bool = False) -> None:
        """``norm_after``: the norm is over the whole group, not over each patch."""
        self._merged, self._names = (
            spec.hidden_size * spec.merge**2,
            ("mlp.0", "mlp.2") if spec.gated else ("linear_fc1", "linear_fc2"),
        )
        self._norm_name = "ln_q." if spec.gated else "norm."
        self._norm = vision_norm(spec, self._merged if norm_after else spec.hidden_size, build)
        self._norm_after = norm_after
        self._first = Linear({self._names[0]: self._merged}, self._merged, build, bias=True)
        self._second = Linear({self._names[1]: spec.text_hidden_size}, self._merged, build, bias=True)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        linears = {**self._first.weight_loaders(), **self._second.weight_loaders()}
        return {**linears, **prefixed(self._norm_name, self._norm.weight_loaders())}

    def __call__(self, x: Tensor) -> Tensor:
        """``[num_patches, hidden_size]`` → ``[num_patches / merge², text_hidden_size]``."""
        x = self._norm(x.view(-1, self._merged)) if self._norm_after else self._norm(x).view(-1, self._merged)
        return self._second(functional.gelu(self._first(x)))


def vision_norm(spec: VisionSpec, size: int, build: Build) -> LayerNorm | RmsNorm:
    """Return a norm as this model has them."""
    return RmsNorm(size, build) if spec.gated else LayerNorm(size, build.eps)


def grouped(rows: int, columns: int, merge: int) -> Tensor:
    """Return the row and the column of each patch, group by group: ``[num_patches, 2]``."""
    at = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
    at = at.view(rows // merge, merge, columns // merge, merge, 2)
    return at.transpose(1, 2).reshape(-1, 2)


def _taps(index: Tensor, size: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """Return the two neighbours among ``side`` positions of each of ``size`` places, and their weights."""
    place = index.float() * (side - 1) / max(size - 1, 1)
    low = place.floor()
    return [
        ((low.long() + step).clamp(0, side - 1), (1 - (place - low - step).abs()).clamp(min=0))
        for step in (0, 1)
    ]

"""The calibration text through the model, one decoder layer in memory at a time, with what each linear reads.

The layers, kernels and loaders are the engine's own, so every family that it runs is calibrated as it runs. Hidden
states of all tokens are kept between layers; K and V of a layer live while its sequences are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.errors import ConfigError, ModelLoadError
from quire.kernels.attention.batch import RaggedBatch
from quire.kernels.lora import AdapterRows
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.registry import choose
from quire.kernels.threads import choose_threads
from quire.layers.attention import GroupBatch
from quire.layers.linear import Linear
from quire.layers.rope import RopeTable
from quire.layers.weights import NO_FORMATS, Build, MatrixLoader
from quire.models.decoder import DecoderLayer
from quire.models.loader import iter_weights
from quire.modelspec import ModelSpec, weight_shapes
from quire.parallel.shard import uncut
from quire.runner.memory import KvCache, torch_dtype

Observer = Callable[[Tensor], None]


class InputStats:
    """What is known of the rows that a linear reads: their products, and the largest magnitude of each input."""

    def __init__(self, in_features: int, num_kept: int = 32) -> None:
        """``num_kept``: rows of each step that are kept as they are."""
        self.products = torch.zeros(in_features, in_features)
        self.largest = torch.zeros(in_features)
        self.num_rows = 0
        self.kept: list[Tensor] = []
        self._per_step = num_kept

    def add(self, rows: Tensor) -> None:
        """Count ``rows [num_tokens, in_features]``."""
        rows = rows.float()
        self.products.addmm_(rows.t(), rows)
        self.largest = torch.maximum(self.largest, rows.abs().amax(0))
        self.num_rows += len(rows)
        self.kept.append(rows[:: max(1, len(rows) // self._per_step)].clone())

    @property
    def gram(self) -> Tensor:
        """The mean of xᵀx, ``[in, in]``."""
        return self.products / max(1, self.num_rows)

    @property
    def rows(self) -> Tensor:
        """Some rows ``[rows, in]``."""
        return torch.cat(self.kept)


class ObservedLinear(Linear):
    """A linear whose rows are seen before they are multiplied. A `Linear` becomes one by its class."""

    observe: Observer | None

    def __call__(
        self, x: Tensor | QuantizedRows, adapters: AdapterRows | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Tensor:  # fmt: skip
        if self.observe is not None:
            assert isinstance(x, Tensor)
            self.observe(x)
        return super().__call__(x, adapters, out_dtype=out_dtype)


@dataclass(frozen=True, slots=True)
class _Step:
    """Sequences that are computed together: their hidden states are rows ``start … stop``."""

    start: int
    stop: int
    group: GroupBatch


class LoadedLayer:
    """One decoder layer with its weights, and the step that computes some sequences."""

    def __init__(self, config: EngineConfig, index: int, ids: Tensor) -> None:
        """Load the weights of layer ``index``. Raises `ModelLoadError`."""
        spec, self.dtype = config.model.spec, torch_dtype(config.model.dtype)
        self._kernels = choose(config.runner)
        layer, prefix = spec.layers[index], f"layers.{index}."
        build = Build(
            self.dtype,
            self._kernels,
            spec.norm_eps,
            spec.norm_plus_one,
            NO_FORMATS,
            None,
            weight_shapes(spec),
            None,
        )
        self.module = DecoderLayer(layer, spec, build.under(prefix))
        self.loaders = {prefix + name: load for name, load in self.module.weight_loaders().items()}
        own = {name: cut for name, cut in uncut(weight_shapes(spec)).items() if name.startswith(prefix)}
        for name, weight in iter_weights(config.model, self.dtype, cuts=own):
            assert isinstance(weight, Tensor)
            self.loaders[name](weight)
        self.linears = _observed(self.module, self.loaders)
        rope = layer.attention.rope
        self._rope = None if rope is None else RopeTable(rope, config.model.max_model_len)
        self._steps, self._cache = _steps(replace(spec, layers=(layer,)), config, ids, self._kernels)
        self._num_tokens = ids.shape[1]

    def run(self, hidden: Tensor) -> Tensor:
        """``hidden [num_tokens, hidden_size]`` of all sequences → the same behind this layer."""
        out = torch.empty_like(hidden)
        with torch.inference_mode():
            for step in self._steps:
                rows = hidden[step.start : step.stop]
                positions = torch.arange(len(rows)) % self._num_tokens
                rope = self._rope
                angles = None if rope is None else (rope.cos[positions], rope.sin[positions])
                delta, residual = self.module(None, rows, angles, step.group, self._cache.views[0])
                out[step.start : step.stop] = residual + delta
        return out

    def observe(self, stats: Mapping[str, InputStats] | None) -> None:
        """Have the linears count their rows in ``stats``, by the name of a weight of each; None: no more."""
        for name, linear in self.linears.items():
            linear.observe = None if stats is None or name not in stats else stats[name].add


def _steps(spec: ModelSpec, config: EngineConfig, ids: Tensor, kernels: Any) -> tuple[list[_Step], KvCache]:
    """Return the steps over all sequences, and a cache for those of one step."""
    num_seqs, num_tokens = ids.shape
    size = config.cache.block_size
    per_seq = -(-num_tokens // size)
    at_once = min(num_seqs, max(1, config.scheduler.max_num_batched_tokens // num_tokens))
    layout = spec.kv_layout(config.model.max_model_len)
    cache = KvCache(spec, layout, at_once * per_seq, size, config.model.kv_dtype, kernels)
    steps = []
    for first in range(0, num_seqs, at_once):
        count = min(at_once, num_seqs - first)
        blocks = torch.arange(count * per_seq).view(count, per_seq)
        places = torch.arange(num_tokens)
        ragged = RaggedBatch(
            np.arange(count + 1, dtype=np.int64) * num_tokens,
            np.full(count, num_tokens, np.int64),
            blocks.numpy(),
        )
        group = GroupBatch(blocks[:, places // size].flatten(), (places % size).repeat(count), ragged)
        steps.append(_Step(first * num_tokens, (first + count) * num_tokens, group))
    return steps, cache


def _observed(module: Any, loaders: Mapping[str, Any]) -> dict[str, ObservedLinear]:
    """Return the linears of a layer by the names of their weights, each able to be observed."""
    of_packed: dict[int, ObservedLinear] = {}
    for linear in _linears(module):
        linear.__class__ = ObservedLinear
        assert isinstance(linear, ObservedLinear)
        linear.observe = None
        of_packed |= {id(packed): linear for packed in linear.segments}
    by_weight = {}
    for name, load in loaders.items():
        if isinstance(load, MatrixLoader) and id(load.matrices[0]) in of_packed:
            by_weight[name] = of_packed[id(load.matrices[0])]
    return by_weight


def _linears(module: Any) -> Iterator[Linear]:
    """Yield the linears among what ``module`` and its parts are made of."""
    for value in vars(module).values():
        if isinstance(value, Linear):
            yield value
        elif type(value).__module__.startswith("quire.layers.") and hasattr(value, "__dict__"):
            yield from _linears(value)


def first_hidden(config: EngineConfig, ids: Tensor) -> Tensor:
    """Return the embeddings of ``ids [num_seqs, num_tokens]``: ``[num_seqs · num_tokens, hidden_size]``.

    Raises:
        ConfigError: the model has layers that are not run here.
    """
    spec, dtype = config.model.spec, torch_dtype(config.model.dtype)
    if (
        spec.state_layers
        or spec.per_layer is not None
        or any(a.kv_layer is not None for a in spec.attentions)
    ):
        raise ConfigError(
            f"{config.model.name}: layers with states, embeddings per layer, or others' K and V are not run on "
            "calibration text; take --method rtn"
        )
    choose_threads(config.runner.num_threads, torch_is_heavy=True)
    cuts = {"embed.weight": uncut(["embed.weight"])["embed.weight"]}
    for _, table in iter_weights(config.model, dtype, cuts=cuts):
        assert isinstance(table, Tensor)
        rows = table[ids.flatten()]
        return rows if spec.embedding_scale == 1.0 else rows * torch.tensor(spec.embedding_scale, dtype=dtype)
    raise ModelLoadError(f"{config.model.path} has no embedding.")

"""One decoder for every `ModelSpec`: dense and mixture of experts, plain and latent attention, every norm order.

Weights arrive one tensor at a time under their canonical names (`modelspec`) and are copied into the layout that the
kernels read, so there is never a second copy of the model. The residual stream is ``[num_tokens, hidden_size]``, in
fp32 on a CPU; each token is computed from its own row and from the cache alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from quire.config import LoraConfig
from quire.errors import ModelLoadError
from quire.kernels.kv_blocks import KvView
from quire.kernels.linear import PackedLinear
from quire.kernels.lora import AdapterRows
from quire.kernels.pointwise import add_rows, cap_logits, scale_rows, take_rows
from quire.kernels.quantized_rows import QuantizedRows
from quire.kernels.registry import KernelChoice
from quire.kv_layout import KvLayout
from quire.layers import context_rows as cp_rows
from quire.layers.attention import AdapterBatch, Attention, CosSin, StepBatch
from quire.layers.context import ContextParallel
from quire.layers.linear import Embedding, LoraTarget, lora_targets
from quire.layers.mlp import Mlp
from quire.layers.norm import RmsNorm
from quire.layers.rope import RopeTable
from quire.layers.sources import sources_of
from quire.layers.weights import (
    NO_FORMATS,
    WHOLE,
    Build,
    Formats,
    MatrixLoader,
    Stage,
    TensorParallel,
    WeightLoader,
    prefixed,
)
from quire.models.packed_cache import CheckpointWeights
from quire.modelspec import LayerSpec, ModelSpec, weight_shapes
from quire.quant.stored import Weight
from quire.weight_format import PLAIN
from quire.weight_plan import adaptable

if TYPE_CHECKING:
    from quire.layers.moe import MoeBlock
    from quire.models.hidden_watcher import HiddenWatcher

# (delta, residual), each [num_tokens, hidden_size]; their sum is the residual stream. Behind them what the stages so
# far have for a `HiddenWatcher`.
Hidden = tuple[Tensor, ...]


class Decoder:
    """Build, `load` every weight, then `forward` and `logits`."""

    def __init__(
        self, spec: ModelSpec, kv_layout: KvLayout, max_model_len: int, dtype: torch.dtype, kernels: KernelChoice, *,
        formats: Formats = NO_FORMATS, lora: LoraConfig | None = None, tp: TensorParallel | None = None,
        stage: Stage = WHOLE, cp: ContextParallel | None = None, rope_on_demand: bool = False,
        wide_sums: bool = False,
    ) -> None:  # fmt: skip
        """``formats``: canonical name → how a quantized weight is held (`weight_plan`).

        ``tp``: the ranks that share the layers; ``cp``: those that share the caches; ``stage``: which ends of the
        model are here. ``spec``, ``kv_layout`` and ``formats`` are this rank's. ``rope_on_demand``: `cover` is called
        before each step. ``wide_sums``: norms leave the sums of the residual stream in fp32, not in ``dtype``.
        """
        self.spec = spec
        self.dtype = dtype
        self.stage = stage
        shapes = weight_shapes(spec) if tp is None else tp.shard.shapes
        self._shapes = {n: shape for n, shape in shapes.items() if stage.has(n, spec.tie_word_embeddings)}
        self._missing = set(self._shapes)
        build = Build(dtype, kernels, spec.norm_eps, spec.norm_plus_one, formats, tp, shapes, cp, wide_sums)
        self._cp = cp
        ends_of, layer_of, norm_of = Ends, DecoderLayer, RmsNorm
        if spec.per_layer is not None:
            ends_of, layer_of = import_module("quire.models.per_layer").kinds(spec.per_layer)
        elif spec.vision is not None and spec.vision.changes_layers:
            ends_of, layer_of = import_module("quire.models.seeing").kinds(spec.vision)
        elif any(layer.is_mixed for layer in spec.layers):
            layer_of, norm_of = import_module("quire.models.mixed_layer").kinds(spec)
        self.ends = ends_of(spec, build, stage, adapted=lora is not None)
        self.own_layers = [
            layer_of(layer, spec, build.under(f"layers.{index}."), lora, self.ends, index)
            for index, layer in enumerate(spec.layers)
        ]
        self._norm = norm_of(spec.hidden_size, build, plus_one=spec.norm_plus_one)
        self._sources, self._pairs = sources_of(spec, kv_layout)
        ropes = [None if layer.attn is None else layer.attn.rope for layer in spec.layers]
        kinds = list(dict.fromkeys(rope for rope in ropes if rope is not None))
        self.ropes = [RopeTable(rope, max_model_len, on_demand=rope_on_demand, dtype=dtype) for rope in kinds]
        # The table of each layer; None: it has no position embedding.
        self._rope_of = [None if rope is None else kinds.index(rope) for rope in ropes]
        self._take_rows, self._add_rows = kernels.of(take_rows), kernels.of(add_rows)
        self._loaders = self._collect_loaders()
        self.watcher: HiddenWatcher | None = None

    def _collect_loaders(self) -> dict[str, WeightLoader]:
        loaders = self.ends.weight_loaders()
        if self.stage.is_last:
            loaders.update(prefixed("norm.", self._norm.weight_loaders()))
        for index, layer in enumerate(self.own_layers):
            loaders.update(prefixed(f"layers.{index}.", layer.weight_loaders()))
        # Biases that another rank adds are not in the shapes.
        assert set(loaders) >= set(self._shapes), set(self._shapes) - set(loaders)
        return loaders

    def lora_targets(self) -> dict[str, LoraTarget]:
        """Return "layers.0.attn.q" … → what an adapter changes there; the `ends` are no linears."""
        targets: dict[str, LoraTarget] = {}
        for index, layer in enumerate(self.own_layers):
            targets |= {f"layers.{index}.{name}": target for name, target in layer.lora_targets().items()}
        assert set(targets) == set(adaptable(self.spec)), set(targets) ^ set(adaptable(self.spec))
        return targets

    def quantized_matrices(self) -> dict[str, Sequence[PackedLinear]]:
        """Return the name of each quantized weight → the packed matrices that have it, and maybe others."""
        loaders = {name: self._loaders[name] for name in self._shapes}
        loaded = {name: load.matrices for name, load in loaders.items() if isinstance(load, MatrixLoader)}
        return {name: matrices for name, matrices in loaded.items() if matrices[0].format.quantized}

    def load(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Take all weights from a stream of (canonical name, tensor).

        Raises `ModelLoadError` for a name or a shape that the spec does not have, and for a weight that is missing.
        """
        if isinstance(weights, CheckpointWeights):
            self._missing -= set(weights.fill(self.quantized_matrices()))
        for name, tensor in weights:
            if name not in self._shapes:
                raise ModelLoadError(f"The checkpoint has a weight {name!r} that this model does not take.")
            if tuple(tensor.shape) != self._shapes[name]:
                raise ModelLoadError(
                    f"Weight {name} has shape {list(tensor.shape)}; the model's configuration asks for "
                    f"{list(self._shapes[name])}."
                )
            self._loaders[name](tensor)
            self._missing.discard(name)
        if self._missing:
            some = ", ".join(sorted(self._missing)[:3])
            raise ModelLoadError(f"{len(self._missing)} weights are missing from the checkpoint: {some}, …")

    def cover(self, num_positions: int | None = None) -> None:
        """Have rotary tables for the positions below ``num_positions``, None: for all."""
        for table in self.ropes:
            if num_positions is None or table.num_covered < num_positions:
                table.cover(num_positions)

    def forward(self, batch: StepBatch, kv: Sequence[KvView], entering: Hidden | None = None) -> Tensor:
        """Compute all tokens of the step, storing their K and V; ``kv`` has one view per layer that attends.

        ``entering``: what the stage before returned. Returns the hidden states that give logits, after the last norm:
        ``[num_logits, hidden_size]``.
        """
        delta, residual, *_ = self.layers(batch, kv, entering)
        hidden, watcher = self._norm.add(delta, residual)[0], self.watcher
        if watcher is None or watcher.taps:
            return hidden
        watcher.store(batch, [hidden])
        return self._take_rows(hidden, batch.logits_indices)

    def layers(self, batch: StepBatch, kv: Sequence[KvView], entering: Hidden | None = None) -> Hidden:
        """As `forward`, up to the last layer of this stage; all tokens, unless it is the last one."""
        cos_sin: list[Any] = [
            tuple([self._take_rows(table, batch.positions) for table in rope.tables]) for rope in self.ropes
        ]
        delta: Tensor | None
        cp = self._cp if batch.divided else None
        if cp is not None:
            batch, entering = cp_rows.own_rows(cp, batch, entering)
        delta, residual, *seen = entering or (None, self.ends.embed(batch.input_ids, batch.end_tokens))
        last = len(self.own_layers) - 1 if self.stage.is_last else -1
        watcher, groups = self.watcher, cast("Sequence[Any]", (*batch.groups, batch.states))
        views: Sequence[object] = kv if batch.states is None else (*kv, *batch.states.views)
        groups, views = (groups, views) if self._pairs is None else self._pairs.extend(groups, views)
        for index, (layer, (group, view)) in enumerate(zip(self.own_layers, self._sources, strict=True)):
            if watcher is not None and index in watcher.taps:
                seen.append(residual if delta is None else self._add_rows(residual, delta))
            rope = self._rope_of[index]
            angles = None if rope is None else cos_sin[rope]
            rows = batch.logits_indices if index == last and (watcher is None or watcher.taps) else None
            delta, residual = layer(delta, residual, angles, groups[group], views[view], rows, batch.adapters)
        assert delta is not None
        if watcher is not None and watcher.taps and self.stage.is_last:
            watcher.store(batch, seen)
        if cp is not None and not self.stage.is_last:
            return cp_rows.all_rows(cp, len(batch.positions), delta, residual)
        return delta, residual, *seen

    def expert_blocks(self) -> dict[int, MoeBlock]:
        """Return the mixtures of experts of this stage, by the number of their layer in it."""
        return {i: layer.mlp for i, layer in enumerate(self.own_layers) if layer.spec.mlp.moe}  # type: ignore[misc]

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """As `Ends.logits`."""
        return self.ends.logits(hidden, adapters)


class Ends:
    """Token ids → rows and rows → logits, or what a rank has of the two. Heads that draft share them with the model."""

    def __init__(self, spec: ModelSpec, build: Build, stage: Stage, *, adapted: bool = False) -> None:
        """``stage``: which of the two are here. ``adapted``: adapters may change them."""
        self.dtype = build.dtype
        self._scale, self._cap = spec.logits_scale, spec.logits_soft_cap
        tied, scale = spec.tie_word_embeddings, spec.embedding_scale
        self.embedding = Embedding(
            spec.vocab_size, spec.hidden_size, build, tied=tied, scale=scale, stage=stage, adapted=adapted
        )
        self._cap_logits = build.of(cap_logits)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return self.embedding.weight_loaders()

    def load(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Take the weights from a stream of (canonical name, tensor)."""
        loaders = self.weight_loaders()
        with torch.inference_mode():
            for name, weight in weights:
                loaders[name](weight)

    def embed(self, input_ids: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """``input_ids [num_tokens]`` → ``[num_tokens, hidden_size]``, as the first layer reads them."""
        return self.embedding(input_ids, adapters)

    def logits(self, hidden: Tensor, adapters: AdapterRows | None = None) -> Tensor:
        """``[num_logits, hidden_size]`` → fp32 ``[num_logits, vocab_size]``, scaled and capped as the model defines."""
        logits = self.embedding.logits(hidden, adapters)
        if self._scale == 1.0 and self._cap is None:
            return logits
        return self._cap_logits(logits, self._scale, self._cap)


class DecoderLayer:
    """Attention, or a recurrent mixer, and MLP with their norms: pre (Llama), post (OLMo-2) or both (Gemma 2)."""

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, build: Build, lora: LoraConfig | None = None,
        ends: Ends | None = None, index: int = 0,
    ) -> None:  # fmt: skip
        """``ends``, ``index``: of the decoder, and which of its layers this is, for layers that read more than rows."""
        self.spec = spec
        hidden, mlp = model.hidden_size, spec.mlp
        self._cp = build.cp
        self._scale = model.residual_scale
        self._prefix = "attn."
        kind: Any = Attention
        if spec.recurrent is not None:
            kind, self._prefix = import_module("quire.layers.recurrent").mixer_of(spec.recurrent)
        elif spec.attention.is_mla:
            kind = import_module("quire.layers.latent_attention").latent_kind(spec.attention)
        elif spec.attention.v_norm:
            kind = import_module("quire.layers.shared_attention").SharedAttention
        elif spec.attention.output_gate:
            kind = import_module("quire.layers.gated_attention").GatedAttention
        elif spec.attention.qk_norm == "rotated" or (spec.attention.rope and spec.attention.rope.query_scale):
            kind = import_module("quire.layers.post_rope_attention").PostRopeAttention
        # Or another that is called alike: its ``group`` and ``kv`` are what it reads of the step and of its cache.
        self.mixer: Attention = kind(spec.recurrent or spec.attention, hidden, build.under(self._prefix))
        self.mlp: Mlp | MoeBlock
        if mlp.moe is None:
            self.mlp = Mlp(hidden, mlp.intermediate_size, mlp.activation, build.under("mlp."), bias=mlp.bias)
        else:
            self.mlp = import_module("quire.layers.moe").block_of(hidden, mlp, build.under("moe."))
        if lora is not None:
            for linear in (*self.mixer.linears(), *self.mlp.linears()):
                linear.add_slots(lora.max_loras, lora.max_rank)
        names = [] if spec.norms == "post" else ["attn_norm", "mlp_norm"]
        names += ["attn_post_norm", "mlp_post_norm"] if spec.norms in ("post", "sandwich") else []
        readers = {"attn_norm": self.mixer.reads, "mlp_norm": self.mlp.reads}
        self._norms = {
            name: RmsNorm(hidden, build, plus_one=build.norm_plus_one, reader=readers.get(name, PLAIN))
            for name in names
        }
        self._take_rows, self._add_rows = build.of(take_rows), build.of(add_rows)
        self._scale_rows = build.of(scale_rows)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        loaders = prefixed(self._prefix, self.mixer.weight_loaders())
        loaders.update(prefixed("mlp." if isinstance(self.mlp, Mlp) else "moe.", self.mlp.weight_loaders()))
        for name, norm in self._norms.items():
            loaders.update(prefixed(f"{name}.", norm.weight_loaders()))
        return loaders

    def lora_targets(self) -> dict[str, LoraTarget]:
        """Return "attn.q" … → what an adapter changes there."""
        mlp = "mlp." if isinstance(self.mlp, Mlp) else "moe.shared."
        linears = [(self._prefix, module) for module in self.mixer.linears()]
        linears += [(mlp, module) for module in self.mlp.linears()]
        return lora_targets(linears)

    def __call__(
        self, delta: Tensor | None, residual: Tensor, cos_sin: CosSin | None, group: Any, kv: Any,
        rows: Tensor | None = None, adapters: AdapterBatch | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return (delta, residual) of this layer, given those of the layer before it.

        The residual stream is ``residual + delta``: the addition is deferred and fused into the next norm.
        With ``rows`` (the last layer) only those tokens continue once the keys and values of all are stored.
        """
        of_rows = None if adapters is None else adapters.tokens
        x, residual = self._enter("attn_norm", delta, residual)
        delta = self._leave("attn_post_norm", self.mixer(x, cos_sin, group, kv, of_rows))
        if rows is not None and group.divided:
            assert self._cp is not None
            delta, residual = cp_rows.all_rows(self._cp, len(group.slot_blocks), delta, residual)
        if rows is not None:
            delta, residual = self._take_rows(delta, rows), self._take_rows(residual, rows)
            of_rows = None if adapters is None else adapters.logits
        x, residual = self._enter("mlp_norm", delta, residual)
        return self._leave("mlp_post_norm", self.mlp(x, of_rows)), residual

    def _enter(
        self, name: str, delta: Tensor | None, residual: Tensor
    ) -> tuple[Tensor | QuantizedRows, Tensor]:
        norm = self._norms.get(name)
        if norm is not None:
            return norm.enter(delta, residual)
        if delta is not None:
            residual = self._add_rows(residual, delta)
        return residual, residual

    def _leave(self, name: str, x: Tensor) -> Tensor:
        norm = self._norms.get(name)
        if norm is not None:
            x = norm(x)
        return x if self._scale == 1.0 else self._scale_rows(x, self._scale)

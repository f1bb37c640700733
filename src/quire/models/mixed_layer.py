"""Layers that are other than one mixer and one gated MLP.

A block of Nemotron-H is a mixer alone or an MLP alone. A layer of Falcon-H1 attends and keeps a state in parallel: both
read the same normed rows, and the residual stream gets the sum of their outputs, each with a factor.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor

from quire.config import LoraConfig
from quire.kernels.pointwise import add_rows, scale_rows, take_rows
from quire.layers.activated_mlp import ActivatedMlp
from quire.layers.attention import AdapterBatch, Attention, CosSin
from quire.layers.linear import LoraTarget, lora_targets
from quire.layers.norm import RmsNorm
from quire.layers.weights import Build, WeightLoader, prefixed
from quire.models.decoder import DecoderLayer, Ends
from quire.modelspec import LayerSpec, ModelSpec
from quire.weight_format import PLAIN, WeightFormat

if TYPE_CHECKING:
    from quire.layers.moe import MoeBlock


class MixedLayer:
    """Called as `DecoderLayer`. With two mixers ``group`` and ``kv`` are pairs: of the cache, and of the state."""

    def __init__(
        self, spec: LayerSpec, model: ModelSpec, build: Build, lora: LoraConfig | None = None,
        ends: Ends | None = None, index: int = 0,
    ) -> None:  # fmt: skip
        assert spec.norms == "pre"
        assert model.residual_scale == 1.0
        self.spec = spec
        hidden, scales = model.hidden_size, spec.scales or (1.0, 1.0)
        self.mixers: list[tuple[str, Any, float]] = []  # prefix of its weights, mixer, factor on its output
        if spec.attn is not None:
            assert not any((spec.attn.is_mla, spec.attn.v_norm, spec.attn.output_gate)), spec.attn
            self.mixers.append(("attn.", Attention(spec.attn, hidden, build.under("attn.")), scales[0]))
        if spec.recurrent is not None:
            kind, prefix = import_module("quire.layers.recurrent").mixer_of(spec.recurrent)
            self.mixers.append((prefix, kind(spec.recurrent, hidden, build.under(prefix)), scales[1]))
        self.mlp: ActivatedMlp | MoeBlock | None = None
        self._mlp_prefix = "mlp." if spec.mlp.moe is None else "moe."
        if spec.mlp.moe is not None:
            self.mlp = import_module("quire.layers.moe").MoeBlock(hidden, spec.mlp, build.under("moe."))
        elif spec.mlp.intermediate_size:
            self.mlp = ActivatedMlp(hidden, spec.mlp.intermediate_size, spec.mlp, build.under("mlp."))
        if lora is not None:
            for module in (*(mixer for _, mixer, _ in self.mixers), *([self.mlp] if self.mlp else ())):
                for linear in module.linears():
                    linear.add_slots(lora.max_loras, lora.max_rank)

        def norm(readers: list[WeightFormat]) -> RmsNorm:
            reader = readers[0] if len(set(readers)) == 1 else PLAIN
            return RmsNorm(hidden, build, plus_one=build.norm_plus_one, reader=reader)

        self._norms: dict[str, RmsNorm] = {}
        if self.mixers:
            self._norms["attn_norm"] = norm([mixer.reads for _, mixer, _ in self.mixers])
        if self.mlp is not None:
            self._norms["mlp_norm"] = norm([self.mlp.reads])
        self._take_rows, self._add_rows = build.of(take_rows), build.of(add_rows)
        self._scale_rows = build.of(scale_rows)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        loaders: dict[str, WeightLoader] = {}
        for prefix, mixer, _ in self.mixers:
            loaders |= prefixed(prefix, mixer.weight_loaders())
        if self.mlp is not None:
            loaders |= prefixed(self._mlp_prefix, self.mlp.weight_loaders())
        for name, norm in self._norms.items():
            loaders |= prefixed(f"{name}.", norm.weight_loaders())
        return loaders

    @property
    def mixer(self) -> Any:
        """Its attention, where it has one."""
        return self.mixers[0][1]

    def lora_targets(self) -> dict[str, LoraTarget]:
        """As of `DecoderLayer`."""
        linears = [(prefix, linear) for prefix, mixer, _ in self.mixers for linear in mixer.linears()]
        if self.mlp is not None:
            mlp = "mlp." if self._mlp_prefix == "mlp." else "moe.shared."
            linears += [(mlp, linear) for linear in self.mlp.linears()]
        return lora_targets(linears)

    def __call__(
        self, delta: Tensor | None, residual: Tensor, cos_sin: CosSin | None, group: Any, kv: Any,
        rows: Tensor | None = None, adapters: AdapterBatch | None = None,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        """As of `DecoderLayer`."""
        of_rows = None if adapters is None else adapters.tokens
        if self.mixers:
            x, residual = self._norms["attn_norm"].enter(delta, residual)
            delta = None
            for number, (_, mixer, scale) in enumerate(self.mixers):
                own = (group, kv) if len(self.mixers) == 1 else (group[number], kv[number])
                y = mixer(x, cos_sin, *own, of_rows)
                y = y if scale == 1.0 else self._scale_rows(y, scale)
                delta = y if delta is None else self._add_rows(delta, y)
        if rows is not None:
            delta = None if delta is None else self._take_rows(delta, rows)
            residual = self._take_rows(residual, rows)
            of_rows = None if adapters is None else adapters.logits
        if self.mlp is None:
            return delta, residual
        x, residual = self._norms["mlp_norm"].enter(delta, residual)
        return self.mlp(x, of_rows), residual


def kinds(spec: ModelSpec) -> tuple[Any, Any]:
    """Return what the layers and the last norm of a model are made by."""
    if not spec.norm_centered:
        return layer_of, RmsNorm
    return layer_of, import_module("quire.layers.centered_norm").CenteredNorm


def layer_of(
    spec: LayerSpec, model: ModelSpec, build: Build, lora: LoraConfig | None, ends: Ends, index: int
) -> DecoderLayer | MixedLayer:
    """Return the layer of ``spec`` in a model of which some are mixed."""
    if spec.norms == "parallel":
        kind: Any = import_module("quire.models.parallel_layer").ParallelLayer
    else:
        kind = MixedLayer if spec.is_mixed else DecoderLayer
    layer: DecoderLayer | MixedLayer = kind(spec, model, build, lora, ends, index)
    return layer

"""`shard`: the part of a model that one rank holds and computes. The one truth of slices; torch-free.

Attention is cut by heads and the MLP by its intermediate size: the first matrix of a pair by rows, the second one
(``o``, ``down``) by columns, so that each rank has a partial sum of the block's output and one all_reduce completes it
(Megatron-LM, arXiv:1909.08053, section 3). A recurrent layer is cut by its value heads, with their states. The
vocabulary is cut by rows. What every head needs is on every rank:
norms, routers, MLA's latent projections and its cache; all of attention where one norm goes over all heads (OLMo-2).

Columns are cut at multiples of a quantization group, so that no group lies on two ranks.

Over the ep axis no matrix is cut by columns: experts are whole, and ``o`` and ``down`` are cut by rows, with their
inputs gathered before and their outputs after. Each number is then computed as on one rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import gcd, lcm, prod
from types import MappingProxyType

from quire.errors import ConfigError
from quire.kv_layout import KvGroup, KvLayout
from quire.modelspec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, matrix_bytes, weight_shapes
from quire.parallel.stripe import Stripe
from quire.parallel.topology import Heads, Rank, Topology, share
from quire.recurrent_spec import RecurrentSpec
from quire.weight_format import PLAIN, WeightFormat

Formats = Mapping[str, WeightFormat]
INPUT_UNIT = 64  # inputs kept together where possible: an int8 cache line
# Rows of the vocabulary, and of a matrix whose results are gathered, that stay together.
ROW_UNIT = 16


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of the whole model's weight ``name`` that a rank holds; None is all of that dimension.

    ``rows`` are output features, or the elements of a vector; experts of a stack come before them.
    """

    name: str
    rows: range | None = None
    columns: range | None = None
    experts: range | None = None

    def ranges(self, num_dims: int) -> tuple[range | None, ...]:
        """Return the part of each dimension of the weight."""
        of_experts = bool(re.search(r"\.moe\.(gate|up|down)\.", self.name))
        return ((self.experts,) * of_experts + (self.rows, self.columns))[:num_dims]

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the part, for a weight of shape ``whole``."""
        parts = self.ranges(len(full))
        return tuple(size if part is None else len(part) for size, part in zip(full, parts, strict=True))


def uncut(names: Iterable[str]) -> dict[str, Cut]:
    """Return the cuts of one rank that has everything."""
    return {name: Cut(name) for name in names}


@dataclass(frozen=True, slots=True)
class Shard:
    """``spec`` has the rank's layers, heads and sizes; ``cuts``: weight of ``spec`` → where it comes from.

    Weights of ``spec`` that are not in ``cuts`` are not on this rank: those of other stages, and on all ranks of the tp
    axis but the first the biases that are added once.
    """

    topology: Topology
    at: Rank
    whole: ModelSpec
    spec: ModelSpec
    layers: range  # numbers of layers in the whole model
    vocab: range  # rows of the vocabulary; ``spec`` has the whole model's size
    max_vocab: int  # rows of the rank that has the most
    cuts: Mapping[str, Cut]
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)  # shapes of ``cuts``

    @property
    def vocab_begins(self) -> tuple[int, ...]:
        """Where the rows of the vocabulary begin on each rank that shares a layer, and where the last ones end."""
        ways, size = self.topology.tp * self.topology.ep, self.whole.vocab_size
        return tuple(min(size, rank * self.max_vocab) for rank in range(ways + 1))

    @property
    def is_first(self) -> bool:
        """Whether this stage has the embedding."""
        return self.at.pp == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage has the output matrix."""
        return self.at.pp == self.topology.pp - 1

    def formats(self, of_model: Formats) -> dict[str, WeightFormat]:
        """Return the formats of this rank's weights, given those of the whole model."""
        return {local: of_model[cut.name] for local, cut in self.cuts.items() if cut.name in of_model}

    def weight_bytes(self, dtype: str, of_model: Formats = MappingProxyType({})) -> int:
        """Return the bytes of this rank's weights in memory."""
        own = self.formats(of_model)
        return sum(
            matrix_bytes(shape, dtype, own.get(name, PLAIN)) for name, shape in self.shapes.items() if shape
        )

    def lacks(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return which weights of the whole model this rank does not have, or not whole."""
        uncut_names = {cut.name for cut in self.cuts.values() if (cut.rows, cut.columns) == (None, None)}
        return tuple(name for name in names if name not in uncut_names)

    def stripe(self, block_size: int) -> Stripe | None:
        """Return the positions that this rank's cache has, with blocks of ``block_size`` positions over all ranks.

        None: all of them.
        """
        cp = self.topology.cp
        assert block_size % cp == 0, (block_size, cp)
        return None if cp == 1 else Stripe(self.at.cp, cp, block_size // cp)

    def kv_layout(self, of_model: KvLayout) -> KvLayout:
        """Return the layout of this rank's cache: the model's groups, each with the layers of this stage alone."""
        own = {layer.layer: layer for layer in self.spec.kv_layers()}
        groups = []
        for group in of_model.groups:
            layers = [own[i - self.layers.start] for i in group.layers if i in self.layers]
            heads = tuple(dict.fromkeys(layer.heads for layer in layers)) or group.heads
            groups.append(KvGroup(tuple(layer.layer for layer in layers), group.window, heads))
        return KvLayout(tuple(groups))


def shard(spec: ModelSpec, topology: Topology, rank: int, formats: Formats = MappingProxyType({})) -> Shard:
    """Return what ``rank`` holds of ``spec``; ``formats``: canonical name → format of the quantized weights.

    Raises:
        ConfigError: a size of ``topology`` is larger than what it cuts; names the field, the value and what is allowed.
    """
    at = topology.coordinates(rank)
    layers = topology.layers_of(*_costs(spec), at.pp)
    cutter = _Cutter(spec, topology, at, formats)
    local = [cutter.layer(index, number) for number, index in enumerate(layers)]
    rows = -(-spec.vocab_size // cutter.ways)
    padded = -(-rows // ROW_UNIT) * ROW_UNIT
    first_row = cutter.index * padded
    vocab = range(min(spec.vocab_size, first_row), min(spec.vocab_size, first_row + padded))
    vocab_cut = vocab if cutter.ways > 1 else None
    cuts: dict[str, Cut] = {}
    first, last = at.pp == 0, at.pp == topology.pp - 1
    if spec.per_layer is not None:
        for name, size in (("pipeline", topology.pp), ("context", topology.cp)):
            if size > 1:
                raise ConfigError(
                    f"{name}_parallel_size = {size}: layers of {spec.architecture} read more than the rows of the "
                    "layer before; only 1 is allowed."
                )
    cuts.update({name: Cut(name) for name in weight_shapes(spec) if name.startswith("per_layer.")})
    if first or (last and spec.tie_word_embeddings):
        cuts["embed.weight"] = Cut("embed.weight", vocab_cut)
    cuts.update(cutter.cuts)
    if last:
        cuts["norm.weight"] = Cut("norm.weight")
        if not spec.tie_word_embeddings:
            cuts["lm_head.weight"] = Cut("lm_head.weight", vocab_cut)
    full_shapes = weight_shapes(spec)
    shapes = {local: cut.shape(full_shapes[cut.name]) for local, cut in cuts.items()}
    return Shard(topology, at, spec, replace(spec, layers=tuple(local)), layers, vocab, padded, cuts, shapes)


# Share of the time that a server spends on prompts. Traffic has several prompt tokens per output token, and a row of a
# prompt takes two thirds of the time of a row that decodes.
PROMPTS = 2 / 3


def _costs(spec: ModelSpec) -> tuple[list[float], float]:
    """Return the weights that a token is multiplied with: of each layer, and of the output matrix.

    A prompt is multiplied once with the output matrix and with the last layer's MLP, so these are mostly a part of
    decoding alone.
    """
    costs = [0.0] * spec.num_layers
    for name, shape in weight_shapes(spec).items():
        if name.startswith("layers."):
            index = int(name.split(".")[1])
            moe = spec.layers[index].mlp.moe
            chosen = moe.top_k / moe.num_experts if moe is not None and len(shape) == 3 else 1.0
            is_last_mlp = index == spec.num_layers - 1 and (".mlp." in name or ".moe." in name)
            costs[index] += prod(shape) * chosen * (1 - PROMPTS if is_last_mlp else 1.0)
    return costs, spec.vocab_size * spec.hidden_size * (1 - PROMPTS)


class _Cutter:
    """Collects ``cuts`` while it goes over the layers of a stage."""

    def __init__(self, spec: ModelSpec, topology: Topology, at: Rank, formats: Formats) -> None:
        assert topology.tp == 1 or topology.ep == 1, topology
        self._spec, self._topology, self._at, self._formats = spec, topology, at, formats
        self.ways, self.index = topology.tp * topology.ep, at.tp + at.ep  # parts of a layer, and which one
        self._has_experts = any(layer.mlp.moe for layer in spec.layers)
        self.cuts: dict[str, Cut] = {}

    def layer(self, index: int, number: int) -> LayerSpec:
        """Cut layer ``index`` of the model, which is layer ``number`` of the rank; return its spec there."""
        layer, prefix = self._spec.layers[index], f"layers.{index}."
        attention, recurrent = layer.attn, layer.recurrent
        cuts: dict[str, _Parts] = {}
        if attention is not None:
            attention, cuts = self._attention(attention, prefix)
        if recurrent is not None:
            recurrent, of_state = self._recurrent(recurrent, prefix)
            cuts.update(of_state)
        mlp = layer.mlp
        if layer.has_mlp:
            mlp, more = self._mlp(mlp, prefix)
            cuts.update(more)
        one = replace(self._spec, layers=(layer,))
        for name in weight_shapes(one):
            part = name.removeprefix("layers.0.")
            if part == name or self._is_added_elsewhere(part, layer):
                continue
            rows, columns, experts = cuts.get(part, (None, None, None))
            if self.ways == 1:
                rows = columns = None
            self.cuts[f"layers.{number}.{part}"] = Cut(prefix + part, rows, columns, experts)
        return replace(layer, attn=attention, mlp=mlp, recurrent=recurrent)

    def _is_added_elsewhere(self, part: str, layer: LayerSpec) -> bool:
        """Whether a bias is part of the first rank's partial sum."""
        if part == "attn.o.bias" and layer.attention.qk_norm == "full":
            return False
        return self._at.tp > 0 and part in ("attn.o.bias", "conv.o.bias", "mlp.down.bias", "moe.down.bias")

    def _group(self, name: str) -> int:
        """Return how many inputs of a matrix must stay together."""
        return self._formats.get(name, PLAIN).group or 1

    def _attention(self, a: AttentionSpec, prefix: str) -> tuple[AttentionSpec, dict[str, _Parts]]:
        if self.ways == 1 or a.qk_norm == "full":
            return a, {}
        kv_heads = a.num_heads if a.is_mla else a.num_kv_heads
        if self._topology.ep > 1:
            if self.ways > a.num_heads and self._has_experts:
                return a, {}
            heads = Topology(tp=self.ways).heads_of(a.num_heads, kv_heads, self.index)
            o: _Parts = (self._outputs(), None, None)
        else:
            group = self._group(prefix + "attn.o.weight")
            heads = self._topology.heads_of(
                a.num_heads, kv_heads, self._at.tp, group // gcd(group, a.v_head_dim)
            )
            o = (None, _times(heads.queries, a.v_head_dim), None)
        cuts = _mla_cuts(a, heads) if a.is_mla else _head_cuts(a, heads)
        cuts["attn.o.weight"], cuts["attn.o.bias"] = o, (o[0], None, None)
        cuts["attn.sinks"] = (heads.queries, None, None)
        num_kv_heads = min(a.num_kv_heads, len(heads.kv)) if a.is_mla else len(heads.kv)
        return replace(a, num_heads=len(heads.queries), num_kv_heads=num_kv_heads), cuts

    def _recurrent(self, r: RecurrentSpec, prefix: str) -> tuple[RecurrentSpec, dict[str, _Parts]]:
        """Cut the delta rule as grouped-query attention, a short convolution by channels.

        Value heads are the queries, key heads the KV heads. Mamba-2 has norms over all heads, and few groups of B and
        C, so every rank has all of it.
        """
        if self.ways == 1 or r.kind == "mamba2":
            return r, {}
        if r.kind == "short_conv":
            return self._short_conv(r, prefix)
        block = "delta." if r.gate is None else "kda."
        if self._topology.ep > 1:
            heads = Topology(tp=self.ways).heads_of(r.num_v_heads, r.num_k_heads, self.index)
            o: _Parts = (self._outputs(), None, None)
        else:
            group = self._group(f"{prefix}{block}o.weight")
            unit = group // gcd(group, r.v_head_dim)
            heads = self._topology.heads_of(r.num_v_heads, r.num_k_heads, self._at.tp, unit)
            o = (None, _times(heads.queries, r.v_head_dim), None)
        k, v = _times(heads.kv, r.k_head_dim), _times(heads.queries, r.v_head_dim)
        rows = dict.fromkeys(("q", "k", "conv_q", "conv_k", "f", "f_b"), k)
        rows |= dict.fromkeys(("v", "z", "conv_v", "z_b"), v) | {"a": heads.queries, "b": heads.queries}
        cuts: dict[str, _Parts] = {f"{block}{name}.weight": (part, None, None) for name, part in rows.items()}
        cuts[f"{block}rate"] = (heads.queries, None, None)
        cuts[f"{block}dt_bias"] = (heads.queries if r.gate is None else k, None, None)
        cuts[f"{block}o.weight"] = o
        own = replace(
            r, num_k_heads=len(heads.kv), num_v_heads=len(heads.queries), conv_channels=2 * len(k) + len(v)
        )
        return own, cuts

    def _short_conv(self, r: RecurrentSpec, prefix: str) -> tuple[RecurrentSpec, dict[str, _Parts]]:
        name, is_gathered = f"{prefix}conv.o.weight", self._topology.ep > 1
        own = self._inner(r.conv_channels, name, 1 if is_gathered else self._group(name))
        cuts: dict[str, _Parts] = {
            f"conv.{part}.{kind}": (own, None, None)
            for part in ("b", "c", "x", "taps")
            for kind in ("weight", "bias")
        }
        cuts["conv.o.weight"] = (self._outputs(), None, None) if is_gathered else (None, own, None)
        cuts["conv.o.bias"] = (self._outputs() if is_gathered else None, None, None)
        return replace(r, conv_channels=len(own)), cuts

    def _outputs(self) -> range:
        """Return this rank's rows of the last matrix of a block, where these are gathered."""
        hidden = self._spec.hidden_size
        return share(hidden, self.ways, self.index, ROW_UNIT if hidden >= self.ways * ROW_UNIT else 1)

    def _mlp(self, mlp: MlpSpec, prefix: str) -> tuple[MlpSpec, dict[str, _Parts]]:
        if mlp.moe is None:
            inter, cuts = self._dense("mlp.", mlp.intermediate_size, prefix)
            return replace(mlp, intermediate_size=inter), cuts
        moe = mlp.moe
        if self._topology.ep > 1:
            cuts = _mlp_cuts("moe.", None, None, self._topology.experts_of(moe.num_experts, self._at.ep))
        else:
            inter, cuts = self._dense("moe.", moe.intermediate_size, prefix)
            moe = replace(moe, intermediate_size=inter)
        if moe.shared_intermediate_size:
            inter, more = self._dense("moe.shared.", moe.shared_intermediate_size, prefix)
            cuts.update(more)
            moe = replace(moe, shared_intermediate_size=inter)
        return replace(mlp, moe=moe), cuts

    def _dense(self, block: str, size: int, prefix: str) -> tuple[int, dict[str, _Parts]]:
        """Return this rank's part of the intermediate size ``size`` of a block, and its cuts."""
        name, is_gathered = f"{prefix}{block}down.weight", self._topology.ep > 1
        inter = self._inner(size, name, 1 if is_gathered else self._group(name))
        columns, rows = (None, self._outputs()) if is_gathered else (inter, None)
        return len(inter), _mlp_cuts(block, inter, columns, None, rows)

    def _inner(self, size: int, name: str, group: int) -> range:
        """Return this rank's part of an intermediate size, of which ``group`` must stay together."""
        tp = self.ways
        unit = lcm(group, INPUT_UNIT)
        if size < 8 * tp * unit:  # coarse units would make the shares uneven
            unit = lcm(group, 2)
        if -(-size // unit) < tp:
            raise ConfigError(
                f"tensor_parallel_size = {tp}: {name} has {size} inputs in groups of {unit}; at most "
                f"{-(-size // unit)} is allowed."
            )
        return share(size, tp, self.index, unit)


_Parts = tuple[range | None, range | None, range | None]  # rows, columns, experts


def _times(items: range, size: int) -> range:
    return range(items.start * size, items.stop * size)


def _head_cuts(a: AttentionSpec, heads: Heads) -> dict[str, _Parts]:
    rows = {
        "q": _times(heads.queries, a.head_dim),
        "k": _times(heads.kv, a.head_dim),
        "v": _times(heads.kv, a.v_head_dim),
    }
    if a.output_gate:
        rows["gate"] = _times(heads.queries, 1 if a.output_gate == "head" else a.v_head_dim)
    return {f"attn.{name}.{kind}": (rows[name], None, None) for name in rows for kind in ("weight", "bias")}


def _mla_cuts(a: AttentionSpec, heads: Heads) -> dict[str, _Parts]:
    q = _times(heads.queries, a.head_dim)
    return {
        "attn.q.weight": (q, None, None),
        "attn.q_b.weight": (q, None, None),
        "attn.gate.weight": (heads.queries, None, None),
        "attn.kv_b.weight": (_times(heads.queries, a.qk_nope_head_dim + a.v_head_dim), None, None),
    }


def _mlp_cuts(
    prefix: str, inter: range | None, columns: range | None, experts: range | None, rows: range | None = None
) -> dict[str, _Parts]:
    """``inter``: rows of gate and up; ``columns``, ``rows``: of down."""
    cuts: dict[str, _Parts] = {
        f"{prefix}{name}.{kind}": (inter, None, experts)
        for name in ("gate", "up")
        for kind in ("weight", "bias")
    }
    cuts[f"{prefix}down.weight"] = (rows, columns, experts)
    cuts[f"{prefix}down.bias"] = (rows, None, experts)
    return cuts

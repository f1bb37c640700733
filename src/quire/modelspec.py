"""`ModelSpec`: a model as data. The only source of shapes, bytes, FLOPs and cache groups.

A family (`quire.families`) turns a ``config.json`` into a `ModelSpec`; the loader, the decoder, the memory
budget, the planner and the simulator read it. Torch-free.

Canonical weight names, with shapes (`weight_shapes`): linears are stored ``[out_features, in_features]``.

    embed.weight [vocab, hidden]   lm_head.weight [vocab, hidden] (absent when tied)   norm.weight [hidden]
    layers.{i}.attn_norm.weight, .attn_post_norm.weight, .mlp_norm.weight, .mlp_post_norm.weight      [hidden]
    layers.{i}.attn.{q,k,v,gate,o}.{weight,bias}, .q_norm.weight, .k_norm.weight, .sinks [num_heads]
    layers.{i}.attn.{q_a,q_b,kv_a,kv_b}.weight, .q_a_norm.weight, .kv_a_norm.weight                    (MLA)
    layers.{i}.{delta,mamba,conv}.… of recurrent layers (`quire.recurrent_weights`)
    layers.{i}.mlp.{gate,up,down}.{weight,bias}
    layers.{i}.moe.router.{weight,bias}, .correction_bias [experts]
    layers.{i}.moe.{gate,up}.{weight,bias} [experts, inter, hidden], .down.{weight,bias} [experts, hidden, inter]
    layers.{i}.moe.shared.{gate,up,down}.weight, .shared_gate.weight
    layers.{i}.moe.{router_norm,norm,post_norm,shared_post_norm}.weight [hidden], .expert_scale [experts]
    layers.{i}.per_layer.{gate,out}.weight, .norm.weight, .scale [1]
    per_layer.table.weight [vocab, layers · size], per_layer.projection.weight, per_layer.norm.weight [size]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from math import prod
from types import MappingProxyType
from typing import Literal

from quire.encoder_spec import EncoderSpec
from quire.kv_layout import KV_DTYPE_BYTES, KvGroup, KvHeads, KvLayer, KvLayout
from quire.pooling import SentenceSpec
from quire.recurrent_spec import RecurrentSpec
from quire.rope_spec import RopeSpec
from quire.vision_spec import VisionSpec
from quire.weight_format import PLAIN, WeightFormat

DTYPE_BYTES = KV_DTYPE_BYTES
UNGATED = ("relu2", "xielu")  # activations of MLPs without a gate


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of one layer: MHA, GQA, MQA, or MLA (DeepSeek-V2, arXiv:2405.04434: ``kv_lora_rank`` > 0)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # q and k; MLA: qk_nope_head_dim + rope dim
    v_head_dim: int
    scale: float  # multiplies q·k
    rope: RopeSpec | None  # None: no position embedding (NoPE layers)
    window: int | None = None  # a query at p sees p − window + 1 … p
    soft_cap: float | None = None  # cap · tanh(score / cap)
    qkv_bias: bool = False
    o_bias: bool = False
    # Attention's output · sigmoid(gate(x)), before o: a gate per element (Qwen3.5), or one per head (LFM3).
    output_gate: Literal[False, True, "head"] = False
    # RMSNorm over head_dim, over the whole projection, or over head_dim behind the rotation (HunYuan).
    qk_norm: Literal["none", "head", "full", "rotated"] = "none"
    sinks: bool = False  # one learned logit per head in the softmax (gpt-oss)
    v_norm: bool = False  # RMSNorm without a weight on each head of v (Gemma 4)
    v_from_k: bool = False  # v is the projection of k, before k's norm
    kv_layer: int | None = None  # an earlier layer whose K and V it reads
    q_lora_rank: int = 0  # MLA; 0: q is one plain projection
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0

    @property
    def is_mla(self) -> bool:
        return self.kv_lora_rank > 0

    @property
    def kv_elements_per_token(self) -> int:
        """Numbers cached per token and layer: K and V of each kv head, or MLA's latent and rope key."""
        return self.kv_heads.number * (self.kv_heads.head_dim + self.kv_heads.v_head_dim)

    @property
    def kv_heads(self) -> KvHeads:
        if self.is_mla:
            return KvHeads(1, self.kv_lora_rank + self.head_dim - self.qk_nope_head_dim, 0)
        return KvHeads(self.num_kv_heads, self.head_dim, self.v_head_dim)


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """Routing of a mixture of experts. Order: scores → (+ correction) → groups → top-k → weights."""

    num_experts: int
    top_k: int
    intermediate_size: int
    scoring: Literal["softmax", "sigmoid", "softmax_after_topk"] = "softmax"
    normalize_topk: bool = True  # divide the chosen weights by their sum
    routed_scale: float = 1.0
    correction_bias: bool = False  # DeepSeek-V3: added for the selection, not to the weights
    num_groups: int = 1  # DeepSeek: experts from the best topk_groups groups
    topk_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"  # V2: max; V3: sum of the two best
    router_bias: bool = False
    expert_bias: bool = False
    shared_intermediate_size: int = 0  # 0: no shared expert
    shared_gate: bool = False  # Qwen2-MoE: sigmoid gate on the shared expert
    latent_size: int = 0  # columns of the projection that experts read
    # Gemma 4: router, experts and shared expert have norms of their own, and each expert a factor on its weight.
    own_norms: bool = False


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Gated MLP ``down(act(gate(x)) * up(x))``, dense or (``moe`` set) a mixture of such experts.

    relu2 and xielu have no gate, ``down(act(up(x)))``. An ``intermediate_size`` of 0: the layer has no MLP.
    """

    intermediate_size: int
    activation: Literal["silu", "gelu_tanh", "gelu", "swiglu_oai", "relu2", "xielu"] = "silu"
    bias: bool = False
    moe: MoeSpec | None = None
    scales: tuple[float, float] | None = None  # gate before act, output (Falcon-H1)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: it attends or keeps a state, then its MLP.

    ``norms``: before each block (pre), after it (post, OLMo-2), or both (Gemma 2). "parallel": attention and MLP read
    the rows of one norm, and their outputs are added (Command R). With ``attn`` and ``recurrent`` both read the same
    rows, and the sum of their outputs, times ``scales``, goes on (Falcon-H1).
    """

    attn: AttentionSpec | None
    mlp: MlpSpec
    norms: Literal["pre", "post", "sandwich", "parallel"] = "pre"
    recurrent: RecurrentSpec | None = None
    scales: tuple[float, float] | None = None

    @property
    def has_mlp(self) -> bool:
        """Whether it has an MLP or experts."""
        return self.mlp.intermediate_size > 0 or self.mlp.moe is not None

    @property
    def is_mixed(self) -> bool:
        """Whether it is other than one mixer and one gated MLP (`quire.models.mixed_layer`)."""
        one_mixer = (self.attn is None) != (self.recurrent is None)
        is_plain = one_mixer and self.has_mlp and self.norms != "parallel"
        return not is_plain or self.mlp.activation in UNGATED or self.mlp.scales is not None

    @property
    def attention(self) -> AttentionSpec:
        """Attention of a layer that is known to attend; `ModelSpec.attentions` has those of a model."""
        assert self.attn is not None
        return self.attn


@dataclass(frozen=True, slots=True)
class PerLayerSpec:
    """What Gemma 4 adds to each layer: a factor on its output and, with a size, an embedding of each token.

    The embedding of a layer is ``(norm(projection of the token's row) + row of a table) / √2``, ``embedding_size``
    numbers; 0: there is none.
    """

    embedding_size: int = 0
    vocab_size: int = 0  # rows of the table


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """All that the engine needs to know about a model before it reads a weight."""

    family: str  # "llama", "gemma3", …
    architecture: str  # in config.json, such as "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_position_embeddings: int
    dtype: str = "bfloat16"  # the checkpoint's
    tie_word_embeddings: bool = False
    norm_plus_one: bool = False  # Gemma: x̂ · (1 + w)
    norm_centered: bool = False  # Command R: LayerNorm without a bias
    embedding_scale: float = 1.0  # Gemma: sqrt(hidden), Granite: embedding_multiplier
    residual_scale: float = 1.0  # Granite: factor on each block's output
    logits_scale: float = 1.0  # multiplies the logits (Granite: 1 / logits_scaling)
    logits_soft_cap: float | None = None
    per_layer: PerLayerSpec | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    encoder: EncoderSpec | None = None  # in place of ``layers``
    sentence: SentenceSpec | None = None  # how texts become vectors, where the files say so
    vision: VisionSpec | None = None  # None: text alone

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """Attention of the layers that have it, in order: of all layers but those with a state."""
        return tuple(layer.attn for layer in self.layers if layer.attn is not None)

    @property
    def state_layers(self) -> tuple[int, ...]:
        """Layers that keep a state per sequence instead of K and V per token."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.recurrent is not None)

    @property
    def state_bytes_per_sequence(self) -> int:
        """Bytes of the states of one sequence in all layers."""
        return sum(layer.recurrent.state_bytes for layer in self.layers if layer.recurrent is not None)

    @property
    def num_params(self) -> int:
        """Number of stored weights (a tied output matrix counts once)."""
        return sum(map(prod, weight_shapes(self).values()))

    @property
    def num_active_params(self) -> int:
        """Number of weights that one token multiplies with: only top_k experts, no embedding look-up."""
        total = 0
        for name, shape in weight_shapes(self).items():
            looked_up = name == "per_layer.table.weight" or (
                name == "embed.weight" and not self.tie_word_embeddings
            )
            if len(shape) < 2 or looked_up:
                continue
            size = prod(shape)
            if len(shape) == 3:
                moe = self.layers[int(name.split(".")[1])].mlp.moe
                assert moe is not None
                size = size * moe.top_k // moe.num_experts
            total += size
        return total

    def kv_source(self, index: int) -> int:
        """Return the layer whose K and V layer ``index`` reads: itself, or an earlier one."""
        attn = self.layers[index].attn
        return index if attn is None or attn.kv_layer is None else attn.kv_layer

    def kv_layout(self, max_model_len: int) -> KvLayout:
        """Return the layout of the cache; a window that ``max_model_len`` never fills counts as full attention."""
        return KvLayout.from_layers(
            [
                layer._replace(window=None) if (layer.window or 0) >= max_model_len else layer
                for layer in self.kv_layers()
            ]
        )

    def draft_layout(self) -> KvLayout:
        """Return the layout of this model's cache as a draft: one group that keeps every block."""
        return KvLayout.from_layers([layer._replace(window=None) for layer in self.kv_layers()])

    def kv_layers(self) -> list[KvLayer]:
        """Return the layers that store K and V."""
        return [
            KvLayer(index, layer.attn.window, layer.attn.kv_elements_per_token, layer.attn.kv_heads)
            for index, layer in enumerate(self.layers)
            if layer.attn is not None and layer.attn.kv_layer is None
        ]

    def kv_bytes_per_token(self, group: KvGroup, dtype: str = "bfloat16") -> int:
        """Bytes of K and V of one token in the layers of ``group`` (without padding and scales)."""
        return sum(self.layers[i].attention.kv_elements_per_token for i in group.layers) * DTYPE_BYTES[dtype]

    def weight_bytes(
        self, dtype: str = "bfloat16", formats: Mapping[str, WeightFormat] = MappingProxyType({})
    ) -> int:
        """Bytes of all weights in memory; ``formats``: canonical name → format of the quantized ones."""
        return sum(
            matrix_bytes(shape, dtype, formats.get(name, PLAIN))
            for name, shape in weight_shapes(self).items()
        )


def matrix_bytes(shape: tuple[int, ...], dtype: str, form: WeightFormat) -> int:
    """Bytes of one weight; the matrices of experts ``[experts, out, in]`` count as ``experts · out`` rows."""
    return form.num_bytes(prod(shape[:-1]), shape[-1], DTYPE_BYTES[dtype])


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape of every weight of ``spec`` (see the module's docstring)."""
    if spec.encoder is not None:
        shapes_of = import_module("quire.encoder_weights").encoder_shapes
        by_name: dict[str, tuple[int, ...]] = shapes_of(spec.encoder, spec.vocab_size, spec.hidden_size)
        return by_name
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (spec.vocab_size, hidden)}
    for index, layer in enumerate(spec.layers):
        prefix = f"layers.{index}."
        parts = ("attn",) * bool(layer.attn or layer.recurrent) + ("mlp",) * layer.has_mlp
        if layer.norms == "parallel":
            parts = parts[:1]
        if layer.norms != "post":
            shapes |= {f"{prefix}{part}_norm.weight": (hidden,) for part in parts}
        if layer.norms in ("post", "sandwich"):
            shapes |= {f"{prefix}{part}_post_norm.weight": (hidden,) for part in parts}
        blocks = {} if layer.attn is None else _attention_shapes(layer.attn, hidden)
        if (recurrent := layer.recurrent) is not None:
            blocks |= import_module("quire.recurrent_weights").shapes_of(recurrent, hidden)
        blocks |= _mlp_shapes(layer.mlp, hidden)
        if spec.per_layer is not None:
            blocks |= import_module("quire.weight_shapes").per_layer_shapes(
                spec.per_layer.embedding_size, hidden
            )
        shapes.update({prefix + name: shape for name, shape in blocks.items()})
    shapes["norm.weight"] = (hidden,)
    if spec.per_layer is not None and (size := spec.per_layer.embedding_size):
        width = spec.num_layers * size
        shapes["per_layer.table.weight"] = (spec.per_layer.vocab_size, width)
        shapes["per_layer.projection.weight"] = (width, hidden)
        shapes["per_layer.norm.weight"] = (size,)
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes


def _attention_shapes(a: AttentionSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if a.is_mla:
        shapes = import_module("quire.weight_shapes").latent_shapes(a, hidden)
    else:
        widths = {
            "q": a.num_heads * a.head_dim,
            "k": a.num_kv_heads * a.head_dim,
            "v": a.num_kv_heads * a.v_head_dim,
        }
        if a.v_from_k:
            del widths["v"]
        if a.kv_layer is not None:
            widths = {"q": widths["q"]}
        if a.output_gate:
            widths["gate"] = a.num_heads * (1 if a.output_gate == "head" else a.v_head_dim)
        for name, width in widths.items():
            shapes[f"attn.{name}.weight"] = (width, hidden)
            if a.qkv_bias and (name, a.output_gate) != ("gate", "head"):
                shapes[f"attn.{name}.bias"] = (width,)
        if a.qk_norm != "none":
            full = a.qk_norm == "full"
            shapes["attn.q_norm.weight"] = (widths["q"] if full else a.head_dim,)
            if a.kv_layer is None:
                shapes["attn.k_norm.weight"] = (widths["k"] if full else a.head_dim,)
    shapes["attn.o.weight"] = (hidden, a.num_heads * a.v_head_dim)
    if a.o_bias:
        shapes["attn.o.bias"] = (hidden,)
    if a.sinks:
        shapes["attn.sinks"] = (a.num_heads,)
    return shapes


def _mlp_shapes(mlp: MlpSpec, hidden: int) -> dict[str, tuple[int, ...]]:
    if mlp.moe is not None or mlp.activation in UNGATED or not mlp.intermediate_size:
        shapes: dict[str, tuple[int, ...]] = import_module("quire.weight_shapes").mlp_shapes(mlp, hidden)
        return shapes
    inter = mlp.intermediate_size
    shapes = {
        "mlp.gate.weight": (inter, hidden),
        "mlp.up.weight": (inter, hidden),
        "mlp.down.weight": (hidden, inter),
    }
    if mlp.bias:
        shapes |= {"mlp.gate.bias": (inter,), "mlp.up.bias": (inter,), "mlp.down.bias": (hidden,)}
    return shapes

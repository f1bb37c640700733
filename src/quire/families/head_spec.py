"""`HeadSpec`: heads that draft from the hidden states of a model, as data.

Row i of EAGLE and MTP reads token i and the hidden state of token i − 1, and has the rotary position i − 1. Canonical
names, beside those of one decoder layer ("layers.0.…", `quire.modelspec`):

    eagle   (Li et al. 2024)     fc.weight [hidden, 2 · hidden], fc.bias; no attn_norm; output matrix of the model
    eagle3  (Li et al. 2025)     fc.weight [hidden, 3 · hidden], hidden_norm.weight, norm.weight, lm_head.weight
                                 [draft vocab, hidden]; q, k, v [width, 2 · hidden] read embedding and hidden state
    mtp     (DeepSeek-V3, 2024)  embed_norm.weight, hidden_norm.weight, fc.weight [hidden, 2 · hidden], norm.weight
    medusa  (Cai et al. 2024)    blocks.{head}.{block}.{weight,bias}, lm_heads.{head}.weight
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.modelspec import DTYPE_BYTES, ModelSpec, matrix_bytes, weight_shapes
from quire.weight_format import PLAIN, TWO_LEVEL_BLOCK, TWO_LEVEL_GROUP, WeightFormat

HeadMethod = Literal["medusa", "eagle", "eagle3", "mtp"]
LAYER = "layers.0."


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Heads over the hidden states of a model."""

    method: HeadMethod
    hidden_size: int
    vocab_size: int  # the model's
    model: ModelSpec | None = None  # EAGLE, MTP: a model of one layer, for that layer
    fc_bias: bool = False  # EAGLE
    # EAGLE-3: the layers of the model whose inputs are read; empty: its last hidden state is read.
    taps: tuple[int, ...] = ()
    draft_vocab_size: int = 0  # eagle3: ids that it knows
    num_heads: int = 0  # medusa
    num_blocks: int = 0  # medusa: residual blocks per head
    block_bias: bool = False  # medusa
    own_outputs: bool = False  # medusa: heads have output matrices of their own
    # A draft's row reads what the last norm gave for the token before it, as those of known tokens do.
    feeds_norm: bool = False

    @property
    def max_position_embeddings(self) -> int:
        return 1 << 31 if self.model is None else self.model.max_position_embeddings

    def shared(self, target: ModelSpec) -> tuple[str, ...]:
        """Return the weights of the model ``target`` that the heads read beside their own."""
        embeds, outputs = self.model is not None, not self.own_outputs and not self.draft_vocab_size
        head = "embed.weight" if target.tie_word_embeddings else "lm_head.weight"
        return tuple(dict.fromkeys(["embed.weight"] * embeds + [head] * outputs))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name → shape of every weight."""
        size = self.hidden_size
        if self.model is None:
            shapes: dict[str, tuple[int, ...]] = {}
            for head in range(self.num_heads):
                for block in range(self.num_blocks):
                    shapes[f"blocks.{head}.{block}.weight"] = (size, size)
                    if self.block_bias:
                        shapes[f"blocks.{head}.{block}.bias"] = (size,)
                if self.own_outputs:
                    shapes[f"lm_heads.{head}.weight"] = (self.vocab_size, size)
            return shapes
        shapes = {
            n: s for n, s in weight_shapes(self.model).items() if n not in ("embed.weight", "lm_head.weight")
        }
        inputs = len(self.taps) or 2
        shapes["fc.weight"] = (size, inputs * size)
        if self.fc_bias:
            shapes["fc.bias"] = (size,)
        if self.method == "eagle":
            del shapes[LAYER + "attn_norm.weight"], shapes["norm.weight"]
            return shapes
        shapes["hidden_norm.weight"] = (size,)
        if self.method == "mtp":
            shapes["embed_norm.weight"] = (size,)
            return shapes
        for name in ("q", "k", "v"):
            width, _ = shapes[f"{LAYER}attn.{name}.weight"]
            shapes[f"{LAYER}attn.{name}.weight"] = (width, 2 * size)
        shapes["lm_head.weight"] = (self.draft_vocab_size, size)
        return shapes

    def formats(self, dtype: str) -> dict[str, WeightFormat]:
        """Canonical name → format of every matrix that is quantized on load.

        Drafts are never part of an answer, and a head is read once per draft: EAGLE is held in int4 beside a model in
        bfloat16.
        """
        if dtype != "bfloat16" or self.method not in ("eagle", "eagle3"):
            return {}
        matrices = {name: shape for name, shape in self.shapes().items() if len(shape) == 2}
        int4, int8 = WeightFormat("int4", TWO_LEVEL_GROUP), WeightFormat("int8")
        return {name: int8 if shape[1] % TWO_LEVEL_BLOCK else int4 for name, shape in matrices.items()}

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all weights in memory."""
        formats = self.formats(dtype)
        return sum(
            matrix_bytes(shape, dtype, formats.get(name, PLAIN)) for name, shape in self.shapes().items()
        )

    def block_bytes(self, block_size: int, dtype: str) -> int:
        """Bytes beside each block of the model: K and V, and a hidden state of the model per token."""
        if self.model is None:
            return 0
        hidden = block_size * self.hidden_size * DTYPE_BYTES[dtype]
        return hidden + self.model.draft_layout().block_bytes(block_size, dtype)

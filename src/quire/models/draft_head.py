"""The layers of heads that draft (`quire.families.heads` says which): `DraftHead` for EAGLE and MTP, `MedusaHeads`.

A `DraftHead` is one decoder layer. Its row of token i reads the embedding of token i and the model's hidden state of
token i − 1, and gives the hidden state of token i as it expects it, which the next row may read:

    eagle   x = fc [embedding | hidden]                      attention(x),                      logits of the model
    mtp     x = fc [norm(embedding) | norm(hidden)]          attention(norm(x)),   norm, logits of the model
    eagle3  residual = hidden, attention [norm(embedding) | norm(hidden)],         norm, logits of few ids
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.families.head_spec import LAYER, HeadSpec
from quire.kernels.kv_blocks import KvView
from quire.kernels.pointwise import add_rows, copy_heads, gated, take_rows
from quire.kernels.registry import KernelChoice
from quire.kernels.workspace import empty
from quire.layers.attention import Attention, StepBatch
from quire.layers.gated_attention import GatedAttention
from quire.layers.latent_attention import LatentAttention
from quire.layers.linear import Linear
from quire.layers.mlp import Mlp
from quire.layers.moe import MoeBlock
from quire.layers.norm import RmsNorm
from quire.layers.rope import RopeTable
from quire.layers.weights import Build, WeightLoader, prefixed
from quire.models.decoder import Ends
from quire.modelspec import AttentionSpec


class SharedEnds(NamedTuple):
    """The embedding and the output matrix that heads share with the model, each whole."""

    of_ids: Ends
    of_logits: Ends

    @property
    def dtype(self) -> torch.dtype:
        return self.of_logits.dtype

    def embed(self, input_ids: Tensor) -> Tensor:
        """As `Ends.embed`."""
        return self.of_ids.embed(input_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Ends.logits`."""
        return self.of_logits.logits(hidden)


class DraftHead:
    """EAGLE, EAGLE-3 or MTP. It shares the embedding of the model and, except for EAGLE-3, the output matrix."""

    def __init__(self, spec: HeadSpec, ends: SharedEnds, max_model_len: int, kernels: KernelChoice) -> None:
        assert spec.model is not None
        (layer,) = spec.model.layers
        self.spec, self._ends = spec, ends
        size, attn, mlp = spec.hidden_size, layer.attention, layer.mlp
        formats = spec.formats(str(ends.dtype).removeprefix("torch."))
        build = Build(ends.dtype, kernels, spec.model.norm_eps, spec.model.norm_plus_one, formats)
        of_attention, of_mlp = build.under(LAYER + "attn."), build.under(LAYER + "mlp.")
        self._wide = bool(spec.taps)  # attention reads embedding and hidden state side by side
        self.fc = Linear({"fc": size}, (len(spec.taps) or 2) * size, build, bias=spec.fc_bias)
        self._attention = (
            Attention(attn, size, of_attention, in_size=2 * size)
            if self._wide
            else _kind_of(attn)(attn, size, of_attention)
        )
        self._mlp: Mlp | MoeBlock
        if mlp.moe is None:
            self._mlp = Mlp(size, mlp.intermediate_size, mlp.activation, of_mlp, bias=mlp.bias)
        else:
            self._mlp = MoeBlock(size, mlp, build)
        self._head = Linear({"lm_head": spec.draft_vocab_size}, size, build) if self._wide else None
        names = [name for name in spec.shapes() if name.endswith("norm.weight") and ".attn." not in name]
        self._norms = {
            name.removeprefix(LAYER).removesuffix(".weight"): RmsNorm(
                size, build, plus_one=build.norm_plus_one
            )
            for name in names
        }
        self._rope = None if attn.rope is None else RopeTable(attn.rope, max_model_len)
        self._take_rows, self._add_rows, self._copy = (
            build.of(take_rows),
            build.of(add_rows),
            build.of(copy_heads),
        )

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take all weights from a stream of (canonical name, tensor)."""
        mlp = "mlp." if isinstance(self._mlp, Mlp) else "moe."
        loaders: dict[str, WeightLoader] = {
            **self.fc.weight_loaders(),
            **prefixed(LAYER + "attn.", self._attention.weight_loaders()),
            **prefixed(LAYER + mlp, self._mlp.weight_loaders()),
            **({} if self._head is None else self._head.weight_loaders()),
        }
        for name, norm in self._norms.items():
            prefix = LAYER if name in ("attn_norm", "mlp_norm") else ""
            loaders.update(prefixed(f"{prefix}{name}.", norm.weight_loaders()))
        _load(self.spec, loaders, weights)

    def side_by_side(self, parts: Sequence[Tensor]) -> Tensor:
        """``parts [num_tokens, size]`` → ``[num_tokens, len(parts) · size]``."""
        num_tokens, size = parts[0].shape
        joined = empty(num_tokens, len(parts) * size, dtype=parts[0].dtype)
        for place, part in enumerate(parts):
            self._copy(part.unsqueeze(1), joined[:, place * size : (place + 1) * size].unsqueeze(1))
        return joined

    def forward(self, batch: StepBatch, hidden: Tensor, kv: KvView) -> tuple[Tensor, Tensor]:
        """Compute the rows of ``batch``, storing their K and V. ``hidden [num_tokens, hidden_size]``: what they read.

        Returns what they say of their own tokens, for ``batch.logits_indices``: hidden states ``[num_logits,
        hidden_size]``, and fp32 logits ``[num_logits, draft_vocab_size or vocab_size]`` of the tokens behind them.
        """
        embeddings = self._ends.embed(batch.input_ids)
        if self._wide:
            x = self.side_by_side((self._norm("attn_norm", embeddings), self._norm("hidden_norm", hidden)))
            residual = hidden
        else:
            both = (self._norm("embed_norm", embeddings), self._norm("hidden_norm", hidden))
            residual = self.fc(self.side_by_side(both))
            x = self._norm("attn_norm", residual)
        angles = None
        if self._rope is not None:
            angles = tuple(
                self._take_rows(table, batch.positions) for table in (self._rope.cos, self._rope.sin)
            )
        (group,) = batch.groups
        delta = self._attention(x, angles, group, kv)  # type: ignore[arg-type]
        delta, residual = (self._take_rows(rows, batch.logits_indices) for rows in (delta, residual))
        x, residual = self._norms["mlp_norm"].add(delta, residual)
        output = self._add_rows(residual, self._mlp(x))
        last = self._norm("norm", output)
        logits = self._ends.logits(last) if self._head is None else self._head(last, out_dtype=torch.float32)
        return (last if self.spec.feeds_norm else output), logits

    def _norm(self, name: str, x: Tensor) -> Tensor:
        norm = self._norms.get(name)
        return x if norm is None else norm(x)


def _kind_of(attn: AttentionSpec) -> type[Attention] | type[LatentAttention]:
    if attn.is_mla:
        return LatentAttention
    return GatedAttention if attn.output_gate else Attention


class MedusaHeads:
    """Residual blocks over the last hidden state, ``x + silu(W x)``, each head with an output matrix or the model's."""

    def __init__(self, spec: HeadSpec, ends: SharedEnds, kernels: KernelChoice) -> None:
        self.spec, self._ends = spec, ends
        size, build = spec.hidden_size, Build(ends.dtype, kernels, eps=0.0)
        # A gated linear whose "up" is 1 throughout is silu(W x), in ops that can be recorded.
        self._blocks = [
            [Linear({"gate": size, "up": size}, size, build, bias=True) for _ in range(spec.num_blocks)]
            for _ in range(spec.num_heads)
        ]
        count = spec.num_heads if spec.own_outputs else 0
        self._outputs = [Linear({"out": spec.vocab_size}, size, build) for _ in range(count)]
        self._gated, self._add_rows = build.of(gated), build.of(add_rows)
        self._copy = build.of(copy_heads)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take all weights from a stream of (canonical name, tensor)."""
        loaders: dict[str, WeightLoader] = {}
        for head in range(self.spec.num_heads):
            for block in range(self.spec.num_blocks):
                of_block = self._blocks[head][block].weight_loaders()
                of_block["up.bias"](torch.ones(self.spec.hidden_size))
                loaders[f"blocks.{head}.{block}.weight"] = of_block["gate.weight"]
                loaders[f"blocks.{head}.{block}.bias"] = of_block["gate.bias"]
        for head, output in enumerate(self._outputs):
            loaders[f"lm_heads.{head}.weight"] = output.weight_loaders()["out.weight"]
        _load(self.spec, loaders, weights)

    def logits(self, hidden: Tensor, num_heads: int, num_spare: int = 0) -> Tensor:
        """``hidden [num_seqs, hidden_size]`` → fp32 logits ``[(num_seqs + num_spare) · num_heads, vocab_size]``.

        They are those of the first heads. The last ``num_spare`` sequences have no meaning: a recorded step must have
        another number of logits than of sequences.
        """
        num_seqs, size = hidden.shape
        rows = empty(num_seqs + num_spare, num_heads, size, dtype=hidden.dtype)
        for head, blocks in enumerate(self._blocks[:num_heads]):
            x = hidden
            for block in blocks:
                x = self._add_rows(x, self._gated(block(x), "silu"))
            self._copy(x.unsqueeze(1), rows[:num_seqs, head : head + 1])
        if not self._outputs:
            return self._ends.logits(rows.flatten(0, 1))
        own = [self._outputs[head](rows[:, head], out_dtype=torch.float32) for head in range(num_heads)]
        return torch.stack(own, dim=1).flatten(0, 1)


def _load(spec: HeadSpec, loaders: dict[str, WeightLoader], weights: Iterable[tuple[str, Tensor]]) -> None:
    missing = set(spec.shapes())
    assert missing <= set(loaders), missing - set(loaders)
    with torch.inference_mode():
        for name, tensor in weights:
            loaders[name](tensor)
            missing.discard(name)
    if missing:
        raise ModelLoadError(f"{len(missing)} weights of the heads are missing: {min(missing)}, …")

"""`--rotate`: the same model with a rotated residual stream, written to be rounded (QuaRot, Ashkboos et al. 2024).

With Q = S H, random signs and a Hadamard matrix over √n in blocks of the largest power of two n of the hidden size:

    embedding, and the rows and biases that o and down add      · Q
    q, k, v, gate, up, and the output matrix                    their columns times the weights of the norm before, · Q
    norms                                                       1, as Q changes the length of no row
    v of each KV head, and the columns of o that read it        · H of a head's size

An outlier among the inputs or outputs of a matrix is spread over a block, and no reader has to know. Embedding and
output matrix are no longer the same, so a tied model has both. What down reads would be rotated as the model runs.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from quire.errors import ConfigError
from quire.kernels.rotation import head_block, rotate_heads
from quire.models.stored_weights import view
from quire_lab.quantize.folder import OutFolder
from quire_lab.quantize.scheme import kept
from quire_lab.quantize.source import Matrix, Source, read_source

READERS = {"attn_norm": ("attn.q", "attn.k", "attn.v", "attn.gate"), "mlp_norm": ("mlp.gate", "mlp.up")}
WRITERS = ("attn.o", "mlp.down")
HEAD = "lm_head.weight"


def rotated_source(source: Source, folder: Path, keep: tuple[str, ...]) -> Source:
    """Write the rotated checkpoint to ``folder``, if an earlier run did not, and return it.

    ``folder`` lies in that of one run, so what it has is of the same source and ``keep``. Matrices are in fp32, those
    that ``keep`` matches in the type that they have. Raises `ConfigError`.
    """
    if not folder.exists():
        out = OutFolder(folder, {}, source.num_layers + 1)
        rotation = Rotation(source, keep)
        for layer in range(source.num_layers):
            if out.entries(layer) is None:
                out.add(layer, rotation.layer(layer), [])
        out.add(source.num_layers, rotation.outside(), [])
        out.complete(source.folder, {**source.config, "tie_word_embeddings": False})
        out.finish({})
    return read_source(folder)


def check_rotation(source: Source) -> None:
    """Raise `ConfigError` for a model whose residual stream cannot be rotated."""
    spec = source.checkpoint.spec
    simple = all(
        layer.norms == "pre" and layer.mlp.moe is None and layer.attn is not None and not layer.attn.is_mla
        for layer in spec.layers
    )
    others = (
        spec.per_layer, spec.encoder, spec.vision, spec.state_layers, spec.norm_plus_one, spec.norm_centered,
        source.remarks,
    )  # fmt: skip
    if not simple or any(others):
        raise ConfigError(
            "rotate: norms behind a block, experts, MLA, recurrent layers, images and stacked matrices cannot be; "
            "leave --rotate out"
        )


class Rotation:
    """One model's Q, and its tensors times it."""

    def __init__(self, source: Source, keep: tuple[str, ...]) -> None:
        self._source, self._spec = source, source.checkpoint.spec
        self._kept = kept(source.matrices, keep)
        hidden = self._spec.hidden_size
        signs = torch.randint(0, 2, (hidden,), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
        self._signs = signs * head_block(hidden) ** -0.5

    def layer(self, layer: int) -> dict[str, Tensor]:
        """Return the tensors of ``layer`` by their stored names."""
        source, prefix = self._source, f"layers.{layer}."
        tensors = {name: view(source.tensors[name]) for name in source.layer_tensors(layer)}
        weights = {m.tensor: tensors[m.tensor].float() for m in source.matrices if m.layer == layer}
        for norm, parts in READERS.items():
            name = source.takes[f"{prefix}{norm}.weight"][0]
            factors = tensors[name].float()
            tensors[name] = torch.ones_like(tensors[name])
            for matrix in self._of(layer, parts):
                weights[matrix.tensor] = self._turn(weights[matrix.tensor] * factors)
        for matrix in self._of(layer, WRITERS):
            weights[matrix.tensor] = self._turn(weights[matrix.tensor].t()).t().contiguous()
            bias = source.takes.get(matrix.parts[0].replace(".weight", ".bias"))
            if bias is not None:
                tensors[bias[0]] = self._turn(tensors[bias[0]].float().unsqueeze(0))[0].to(
                    tensors[bias[0]].dtype
                )
        self._turn_heads(layer, weights, tensors)
        for matrix in (m for m in source.matrices if m.layer == layer):
            is_kept = any(pattern.search(matrix.name) for pattern in self._kept)
            dtype = tensors[matrix.tensor].dtype if is_kept else torch.float32
            tensors[matrix.tensor] = weights[matrix.tensor].to(dtype)
        return tensors

    def outside(self) -> dict[str, Tensor]:
        """Return the tensors that belong to no layer."""
        source = self._source
        tensors = {name: view(source.tensors[name]) for name in source.layer_tensors(None)}
        embed, norm = source.takes["embed.weight"][0], source.takes["norm.weight"][0]
        head = source.takes[HEAD][0] if HEAD in source.takes else HEAD
        output = tensors.get(head, tensors[embed])
        factors = tensors[norm].float()
        tensors[head] = self._turn(output.float() * factors).to(output.dtype)
        tensors[embed] = self._turn(tensors[embed].float()).to(tensors[embed].dtype)
        tensors[norm] = torch.ones_like(tensors[norm])
        return tensors

    def _of(self, layer: int, parts: tuple[str, ...]) -> list[Matrix]:
        names = {f"layers.{layer}.{part}.weight" for part in parts}
        return [matrix for matrix in self._source.matrices if names & set(matrix.parts)]

    def _turn(self, rows: Tensor) -> Tensor:
        """``rows [n, hidden]`` · Q."""
        return rotate_heads(rows * self._signs)

    def _turn_heads(self, layer: int, weights: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
        """Rotate v of each head, where it is a matrix of its own, and o, whose inputs it makes."""
        attn = self._spec.layers[layer].attn
        assert attn is not None
        values, (out,) = self._of(layer, ("attn.v",)), self._of(layer, ("attn.o",))
        if not values or len(values[0].parts) > 1 or attn.v_norm or attn.output_gate:
            return
        value = values[0]
        size = attn.v_head_dim
        factor: float = head_block(size) ** -0.5

        def turned(rows: Tensor) -> Tensor:  # [n, heads · size]
            heads: Tensor = torch.unflatten(rows, 1, (-1, size))
            return rotate_heads(heads).flatten(1) * factor

        weights[value.tensor] = turned(weights[value.tensor].t()).t().contiguous()
        weights[out.tensor] = turned(weights[out.tensor])
        bias = self._source.takes.get(value.parts[0].replace(".weight", ".bias"))
        if bias is not None:
            tensors[bias[0]] = turned(tensors[bias[0]].float().unsqueeze(0))[0].to(tensors[bias[0]].dtype)

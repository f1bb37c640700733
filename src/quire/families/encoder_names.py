"""How checkpoints of encoders name their tensors, and the `WeightMap` that follows.

A model of transformers 5 and its first files on the hub may name the same tensors differently, or keep q, k and v in
one: each way is an `EncoderNames`, and the first one whose tensors exist is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.families.vocabulary_heads import STORED
from quire.families.weights import COMPUTED, Take, WeightMap
from quire.modelspec import ModelSpec, weight_shapes

# Buffers, and heads of training that no embedding reads.
IGNORED = (
    r"(\w+\.)?embeddings\.position_ids",
    r"(\w+\.)?pooler\..*",
    r"(cls|lm_head|head|decoder|vocab_transform|vocab_layer_norm|vocab_projector)\..*",
)
_PROJECTIONS = ("attn.q", "attn.k", "attn.v")


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Stored names, each without ".weight" and ".bias".

    ``layer``: what stands before those of ``parts``, with {} for the index. ``prefixes``: what may stand before all.
    ``fused``: the parts of which a stored matrix has the rows, in order.
    """

    layer: str
    parts: Mapping[str, str]
    top: Mapping[str, str]
    prefixes: tuple[str, ...] = ("",)
    head: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def takes(self, canonical: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Take, ...]:
        """Return where the weight may be; empty where these names have none for it."""
        name, _, kind = canonical.rpartition(".")
        shape, start = shapes[canonical], 0
        if canonical.startswith("layers."):
            _, index, part = name.split(".", 2)
            stored = self.parts.get(part)
            for matrix, parts in self.fused.items():
                if part in parts:
                    rows = [shapes[f"layers.{index}.{part}.{kind}"][0] for part in parts]
                    start, stored = sum(rows[: parts.index(part)]), matrix
                    shape = (sum(rows), *shape[1:])
            stored = None if stored is None else self.layer.format(index) + stored
        elif canonical.startswith("head."):
            stored = self.head.get(name)
        elif name.startswith("vocabulary."):
            return ()
        else:
            stored = self.top.get(canonical) or self.top.get(name)
        if stored is None:
            return ()
        # Tables have a kind of their own, and are stored as weights.
        stored += ".weight" if kind == "table" else f".{kind}"
        stop = None if shape == shapes[canonical] else start + shapes[canonical][0]
        named = [stored, *_first_names(canonical, stored)]
        return tuple(
            Take((prefix + each,), shape, start=start, stop=stop)
            for each in named
            for prefix in self.prefixes
        )


def _first_names(canonical: str, stored: str) -> tuple[str, ...]:
    """Return the name of a norm's weight in files of TensorFlow's names: gamma and beta."""
    name, _, kind = canonical.rpartition(".")
    old = {"weight": "gamma", "bias": "beta"}.get(kind)
    return (f"{stored.rpartition('.')[0]}.{old}",) if old is not None and name.endswith("norm") else ()


def encoder_map(spec: ModelSpec, ways: Sequence[EncoderNames]) -> WeightMap:
    """Map the weights of an encoder by each of ``ways``."""
    shapes = weight_shapes(spec)
    sources = {name: tuple(take for way in ways for take in way.takes(name, shapes)) for name in shapes}
    if spec.encoder is not None and spec.encoder.vocabulary is not None:
        sources |= _vocabulary(spec, shapes, ways[0])
    assert all(sources.values()), [name for name, takes in sources.items() if not takes]
    return WeightMap(sources, (*COMPUTED, *IGNORED), 0)


def _vocabulary(
    spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], way: EncoderNames
) -> dict[str, tuple[Take, ...]]:
    """Return where the weights of the head of masked tokens are; those of a tied one are the embedding's."""
    assert spec.encoder is not None
    assert spec.encoder.vocabulary is not None
    found = {}
    for canonical, stored in STORED[spec.family].items():
        if canonical in shapes:
            names = (stored, *_first_names(canonical, stored))
            found[canonical] = tuple(Take((name,), shapes[canonical]) for name in names)
    if spec.encoder.vocabulary.tied:
        found["vocabulary.out.weight"] = way.takes("embed.weight", shapes)
    return found


def qkv_in(stored: str) -> dict[str, tuple[str, ...]]:
    """Return the `fused` entry of a matrix with the rows of q, k and v."""
    return {stored: _PROJECTIONS}


def llama_like(prefixes: tuple[str, ...], norms: Mapping[str, str], **more: str) -> EncoderNames:
    """Return names of Llama's kind; ``norms`` of a layer, ``more`` at the top."""
    parts = {f"attn.{part}": f"self_attn.{part}_proj" for part in "qkvo"}
    parts |= {f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    parts |= {f"attn.{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
    return EncoderNames("layers.{}.", {**parts, **norms}, more, prefixes)

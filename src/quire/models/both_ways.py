"""A decoder in which the tokens of an image see each other both ways (Gemma 3)."""

from __future__ import annotations

from collections.abc import Callable

from quire.config import LoraConfig
from quire.layers.span_attention import BothWays
from quire.layers.weights import Build, Stage
from quire.models.decoder import DecoderLayer, Ends
from quire.modelspec import LayerSpec, ModelSpec


class BothWaysEnds(Ends):
    """Ends that know which rows of a step are such."""

    def __init__(self, spec: ModelSpec, build: Build, stage: Stage, *, adapted: bool = False) -> None:
        super().__init__(spec, build, stage, adapted=adapted)
        self.both_ways = BothWays()


def layer_of(
    spec: LayerSpec, model: ModelSpec, build: Build, lora: LoraConfig | None, ends: Ends, index: int
) -> DecoderLayer:
    """Return a layer whose attention knows them too."""
    layer = DecoderLayer(spec, model, build, lora, ends, index)
    assert isinstance(ends, BothWaysEnds)
    layer.mixer.attend = ends.both_ways.around(layer.mixer.attend)
    return layer


def kinds() -> tuple[type[Ends], Callable[..., DecoderLayer]]:
    """Return what such a decoder is built of."""
    return BothWaysEnds, layer_of

"""`RecurrentMixer`: what the recurrent layers of all families have: two projections, and the taps of a convolution."""

from __future__ import annotations

from quire.layers.linear import Linear, completing
from quire.layers.taps import Taps
from quire.layers.weights import Build, WeightLoader
from quire.recurrent_spec import RecurrentSpec
from quire.recurrent_weights import widths_of
from quire.weight_format import WeightFormat


class RecurrentMixer:
    """Projections in and out, and the convolution's weights. A subclass computes what lies between."""

    def __init__(
        self, spec: RecurrentSpec, hidden_size: int, build: Build, width: int, *, whole: bool = False
    ) -> None:
        """``width``: the inputs of the projection out. ``whole``: each rank of the tp axis has all of it."""
        self._in = Linear(widths_of(spec), hidden_size, build, bias=spec.bias)
        self._o = completing("o", hidden_size, width, build, bias=spec.bias, whole=whole)
        self._taps = Taps(spec)

    def weight_loaders(self) -> dict[str, WeightLoader]:
        return {**self._in.weight_loaders(), **self._o.weight_loaders(), **self._taps.weight_loaders()}

    @property
    def reads(self) -> WeightFormat:
        return self._in.reads

    def linears(self) -> tuple[Linear, ...]:
        """Return the linears that an adapter may change."""
        return self._in, self._o

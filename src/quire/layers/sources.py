"""`sources_of`: where each layer of a decoder finds its part of a step and of the caches; asked once per engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.kv_layout import KvLayout
from quire.modelspec import ModelSpec


@dataclass(frozen=True, slots=True)
class Pairs:
    """Layers that attend and keep a state: their (view of K and V, view of a state), behind all single views."""

    of_views: list[tuple[int, int]]

    def extend(self, groups: Sequence[Any], views: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return groups and states, then each group with the states; views, then those of the pairs."""
        *own, states = groups
        pairs = ((views[of_cache], views[of_state]) for of_cache, of_state in self.of_views)
        return (*groups, *((group, states) for group in own)), (*views, *pairs)


def sources_of(spec: ModelSpec, layout: KvLayout) -> tuple[list[tuple[int, int]], Pairs | None]:
    """Return which (groups of the cache …, states) and which (views of K and V …, views of states) each layer reads.

    A layer with both reads what `Pairs` adds behind them; one with neither is given any.
    """
    sources: list[tuple[int, int]] = []
    pairs: list[tuple[int, int]] = []
    num_attending = num_recurrent = 0
    num_caches, num_views = len(layout.groups), len(spec.attentions) + len(spec.state_layers)
    for index, layer in enumerate(spec.layers):
        group = 0 if layer.attn is None else layout.group_of_layer(spec.kv_source(index))[0]
        of_state = len(spec.attentions) + num_recurrent
        if layer.attn is not None and layer.recurrent is not None:
            sources.append((num_caches + 1 + group, num_views + len(pairs)))
            pairs.append((num_attending, of_state))
        elif layer.recurrent is not None:
            sources.append((num_caches, of_state))
        else:
            sources.append((group, num_attending if layer.attn is not None else 0))
        num_attending += layer.attn is not None
        num_recurrent += layer.recurrent is not None
    return sources, Pairs(pairs) if pairs else None

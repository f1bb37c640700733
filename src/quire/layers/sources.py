"""`sources_of`: where each layer of a decoder finds its part of a step and of the caches; asked once per engine."""

from __future__ import annotations

from quire.kv_layout import KvLayout
from quire.modelspec import ModelSpec


def sources_of(spec: ModelSpec, layout: KvLayout) -> list[tuple[int, int]]:
    """Return which (groups of the cache …, states) and which (views of K and V …, views of states) each layer reads."""
    sources, num_attending, num_recurrent = [], 0, 0
    for index, layer in enumerate(spec.layers):
        if layer.recurrent is None:
            sources.append((layout.group_of_layer(spec.kv_source(index))[0], num_attending))
            num_attending += 1
        else:
            sources.append((len(layout.groups), len(spec.attentions) + num_recurrent))
            num_recurrent += 1
    return sources

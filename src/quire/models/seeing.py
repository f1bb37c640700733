"""What a decoder is built of whose layers know of images."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from quire.models.decoder import DecoderLayer, Ends
from quire.vision_spec import VisionSpec

Kinds = tuple[type[Ends], Callable[..., DecoderLayer]]


def kinds(vision: VisionSpec) -> Kinds:
    """Return the class of its ends, and what makes a layer."""
    made: Kinds
    if vision.deepstack:
        made = import_module("quire.models.deepstack").kinds(len(vision.deepstack))
    else:
        made = import_module("quire.models.both_ways").kinds()
    return made

"""The limits of images (``limits.toml``)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Limits:
    """What an image of a request may be, and how much is kept."""

    max_bytes: int
    max_pixels: int
    max_edge: int  # pixels
    max_images: int  # per request
    max_ratio: int
    prepared_bytes: int
    encoded_bytes: int


LIMITS = Limits(**tomllib.loads((files("quire.images") / "limits.toml").read_text()))

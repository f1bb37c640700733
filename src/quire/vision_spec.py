"""`VisionSpec`: the part of a model that sees, as data: sizes of the encoder, and how images become its input."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """How an image becomes the encoder's input (``preprocessor_config.json``, under transformers' names)."""

    size: int  # pixels of the longest edge after the first resize
    tile: int  # pixels of the edge of a tile
    splits: bool  # into tiles and one view of the whole; off: the view alone
    resample: int  # Pillow's number of the filter; 1: Lanczos
    rescale: float
    mean: tuple[float, ...]  # one per channel
    std: tuple[float, ...]
    min_pixels: int = 0  # pixels of an image that keeps its shape
    max_pixels: int = 0


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """An encoder of images and its projector. ``kind`` is the module of `quire.images` and of `quire.models.vision`."""

    kind: str
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    activation: str  # transformers' name
    eps: float  # layer norms' epsilon
    image_size: int  # pixels of the edge of what the encoder reads
    patch_size: int  # pixels of the edge of a patch
    merge: int  # patches along an edge that become one token
    text_hidden_size: int
    image_token_id: int
    preprocessing: Preprocessing | None = None  # read from its own file, after ``config.json``
    gated: bool = False  # MLPs; their norms have neither mean nor bias
    window: int = 0  # edge of a window of attention, in groups of patches
    whole_layers: tuple[int, ...] = ()  # layers without windows
    deepstack: tuple[int, ...] = ()  # layers whose outputs the decoder's first layers get
    num_positions: int = 0  # learned ones, a square; 0: none
    theta: float = 0.0  # base of the patches' angles; 0: not rotary
    axes: tuple[int, ...] = ()  # the decoder's (time, height, width) per pair of a head
    # Whether the tokens of an image see each other both ways in the decoder.
    both_ways: bool = False
    # What stands for an image in a chat template's text, where its tokens have another id; −1: the same one.
    mark_token_id: int = -1

    @property
    def changes_layers(self) -> bool:
        """Whether the decoder's layers know of images, beside their rows."""
        return self.both_ways or bool(self.deepstack)

    def num_tokens(self, grid: tuple[int, ...]) -> int:
        """Return the tokens of what has ``grid`` pixels."""
        return grid[0] // self.patch_size // self.merge * (grid[1] // self.patch_size // self.merge)

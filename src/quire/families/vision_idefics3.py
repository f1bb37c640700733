"""The encoder of Idefics 3 (arXiv:2408.12637) and SmolVLM: a SigLIP with a shuffle of pixels after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelLoadError
from quire.families.shape import Fields
from quire.families.siglip import siglip_shapes
from quire.modelspec import ModelSpec
from quire.vision_spec import Preprocessing, VisionSpec

# Where checkpoints keep the encoder and its projector.
PREFIXES = ("vision_model.", "connector.")
_PROCESSORS = tuple(
    f"{name}ImageProcessor{kind}" for name in ("Idefics3", "SmolVLM") for kind in ("", "Fast", "Pil")
)


def read_vision(config: Mapping[str, Any], spec: ModelSpec, where: str) -> VisionSpec:
    """Return the encoder; errors as of `quire.families.vision.read_vision`."""
    f = Fields(config, where)
    vision = f.nested("vision_config") or Fields({}, f"{where}, vision_config")
    text = f.nested("text_config")
    if text is not None:
        text.refuse("qk_layer_norms", unless=(False,), why="the decoder's heads have no norms")
        text.refuse("use_resampler", unless=(False,), why="images go through the pixel shuffle")
    vision.refuse("num_channels", unless=(3,), why="images have three channels")
    image_size, patch_size = vision.integer("image_size", 224), vision.integer("patch_size", 32)
    side, merge = image_size // patch_size, f.integer("scale_factor", 2)
    if image_size % patch_size or side % merge:
        raise ModelLoadError(
            f"{where}: image_size = {image_size}, patch_size = {patch_size} and scale_factor = {merge} do not fit: "
            "patches and groups of patches must fill the image. Correct the file or download the model again."
        )
    heads, hidden = vision.integer("num_attention_heads", 16), vision.integer("hidden_size", 1152)
    if hidden % heads:
        raise vision.wrong("num_attention_heads", f"a divisor of hidden_size = {hidden}")
    token_id = f.integer("image_token_id", 128_257, minimum=0)
    if token_id >= spec.vocab_size:
        raise f.wrong("image_token_id", f"below vocab_size = {spec.vocab_size}")
    return VisionSpec(
        kind="idefics3", hidden_size=hidden, num_layers=vision.integer("num_hidden_layers", 12), num_heads=heads,
        intermediate_size=vision.integer("intermediate_size", 3072),
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"), eps=vision.number("layer_norm_eps", 1e-6),
        image_size=image_size, patch_size=patch_size, merge=merge, text_hidden_size=spec.hidden_size,
        image_token_id=token_id,
    )  # fmt: skip


def encoder_shapes(spec: VisionSpec) -> dict[str, tuple[int, ...]]:
    """As `quire.families.vision.encoder_shapes`."""
    shapes = siglip_shapes(spec, PREFIXES[0])
    projection = (spec.text_hidden_size, spec.hidden_size * spec.merge**2)
    return {**shapes, f"{PREFIXES[1]}modality_projection.proj.weight": projection}


def read_preprocessing(config: Mapping[str, Any], vision: VisionSpec, where: str) -> Preprocessing:
    """As `quire.families.vision.read_preprocessing`."""
    f = Fields(config, where)
    f.refuse("image_processor_type", unless=_PROCESSORS, why="each kind cuts images in its own way")
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        f.refuse(key, unless=(True,), why="every image is resized, rescaled, normalized and made RGB")
    size = f.nested("size") or Fields({}, f"{where}, size")
    tiles = f.nested("max_image_size") or Fields({}, f"{where}, max_image_size")
    tile = tiles.integer("longest_edge", 364)
    if tile != vision.image_size:
        raise tiles.wrong("longest_edge", f"the encoder's image_size = {vision.image_size}")
    longest = size.integer("longest_edge", 4 * 364)
    resample = f.integer("resample", 1, minimum=0)
    f.refuse("resample", unless=tuple(range(6)), why="Pillow has no such filter")
    values = {
        key: f.numbers(key, 3) if f.has(key) else (0.5, 0.5, 0.5) for key in ("image_mean", "image_std")
    }
    return Preprocessing(
        size=longest, tile=tile, splits=f.flag("do_image_splitting", True), resample=resample,
        rescale=f.number("rescale_factor", 1 / 255), mean=values["image_mean"], std=values["image_std"],
    )  # fmt: skip

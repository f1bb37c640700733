"""The encoder of Gemma 3 (arXiv:2503.19786): a SigLIP over one square view, averaged to equally many tokens each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.families.shape import Fields
from quire.families.siglip import siglip_shapes
from quire.modelspec import ModelSpec
from quire.vision_spec import Preprocessing, VisionSpec

PREFIXES = ("vision_tower.", "multi_modal_projector.")
_PROCESSORS = tuple(f"Gemma3ImageProcessor{kind}" for kind in ("", "Fast", "Pil"))


def read_vision(config: Mapping[str, Any], spec: ModelSpec, where: str) -> VisionSpec:
    """Return the encoder; errors as of `quire.families.vision.read_vision`."""
    f = Fields(config, where)
    vision = f.nested("vision_config") or Fields({}, f"{where}, vision_config")
    vision.refuse("model_type", unless=("siglip_vision_model",), why="images are seen by a SigLIP")
    vision.refuse("num_channels", unless=(3,), why="images have three channels")
    image_size, patch_size = vision.integer("image_size", 224), vision.integer("patch_size", 16)
    num_tokens = f.integer("mm_tokens_per_image", 256)
    side, tokens = image_size // patch_size, int(num_tokens**0.5)
    if image_size % patch_size or tokens * tokens != num_tokens or side % tokens:
        raise ModelLoadError(
            f"{where}: image_size = {image_size}, patch_size = {patch_size} and mm_tokens_per_image = {num_tokens} do "
            "not fit: squares of patches must fill the image. Correct the file or download the model again."
        )
    heads, hidden = vision.integer("num_attention_heads", 12), vision.integer("hidden_size", 768)
    if hidden % heads:
        raise vision.wrong("num_attention_heads", f"a divisor of hidden_size = {hidden}")
    ids = {"image_token": 262_144, "boi_token": 255_999}
    found = {key: f.integer(f"{key}_index", f.integer(f"{key}_id", n, minimum=0), minimum=0)
             for key, n in ids.items()}  # fmt: skip
    for key, token_id in found.items():
        if token_id >= spec.vocab_size:
            raise f.wrong(f"{key}_index", f"below vocab_size = {spec.vocab_size}, not {token_id}")
    windows = [layer.attention.window for layer in spec.layers if layer.attention.window is not None]
    if min(windows, default=num_tokens) < num_tokens:
        raise UnsupportedModelError(
            f"{where}: sliding_window = {min(windows)} is less than mm_tokens_per_image = {num_tokens}: the tokens of "
            "an image could not see each other."
        )
    return VisionSpec(
        kind="gemma3", hidden_size=hidden, num_layers=vision.integer("num_hidden_layers", 12), num_heads=heads,
        intermediate_size=vision.integer("intermediate_size", 3072),
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"), eps=vision.number("layer_norm_eps", 1e-6),
        image_size=image_size, patch_size=patch_size, merge=side // tokens, text_hidden_size=spec.hidden_size,
        image_token_id=found["image_token"], both_ways=True, mark_token_id=found["boi_token"],
    )  # fmt: skip


def encoder_shapes(spec: VisionSpec) -> dict[str, tuple[int, ...]]:
    """As `quire.families.vision.encoder_shapes`."""
    return {
        **siglip_shapes(spec, PREFIXES[0]),
        f"{PREFIXES[1]}mm_soft_emb_norm.weight": (spec.hidden_size,),
        f"{PREFIXES[1]}mm_input_projection_weight": (spec.hidden_size, spec.text_hidden_size),
    }


def canonical(name: str) -> str:
    """Return the name of a tensor without the level that some files have above the encoder; "" for the pooling head,
    whose vector the decoder never gets (``vision_use_head``)."""
    name = name.replace("vision_tower.vision_model.", "vision_tower.")
    return "" if name.startswith("vision_tower.head.") else name


def read_preprocessing(config: Mapping[str, Any], vision: VisionSpec, where: str) -> Preprocessing:
    """As `quire.families.vision.read_preprocessing`."""
    f = Fields(config, where)
    f.refuse("image_processor_type", unless=_PROCESSORS, why="each kind cuts images in its own way")
    for key in ("do_resize", "do_rescale", "do_normalize"):
        f.refuse(key, unless=(True,), why="every image is resized, rescaled and normalized")
    f.refuse("do_pan_and_scan", unless=(False,), why="an image is seen whole, without crops")
    size = f.nested("size") or Fields({}, f"{where}, size")
    for key in ("height", "width"):
        if size.integer(key, 224) != vision.image_size:
            raise size.wrong(key, f"the encoder's image_size = {vision.image_size}")
    wanted = vision.num_tokens((vision.image_size, vision.image_size))
    f.refuse("image_seq_length", unless=(wanted,), why="config.json says otherwise")
    f.refuse("resample", unless=tuple(range(6)), why="Pillow has no such filter")
    mean, std = (f.numbers(key, 3) if f.has(key) else (0.5, 0.5, 0.5) for key in ("image_mean", "image_std"))
    return Preprocessing(
        size=vision.image_size, tile=vision.image_size, splits=False, resample=f.integer("resample", 2, minimum=0),
        rescale=f.number("rescale_factor", 1 / 255), mean=mean, std=std,
    )  # fmt: skip

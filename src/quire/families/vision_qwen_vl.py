"""Encoders of Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL (arXiv:2511.21631), and the three axes of their positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.errors import ModelLoadError
from quire.families.rope import scaling_fields
from quire.families.shape import Fields
from quire.modelspec import ModelSpec
from quire.vision_spec import Preprocessing, VisionSpec

PREFIXES = ("visual.",)
FRAMES = 2  # an image is seen as two equal frames of a video
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_PROCESSORS = tuple(
    f"Qwen{name}VLImageProcessor{kind}" for name in ("2", "3") for kind in ("", "Fast", "Pil")
)


def read_vision(config: Mapping[str, Any], spec: ModelSpec, where: str) -> VisionSpec:
    """Return the encoder; errors as of `quire.families.vision.read_vision`."""
    f, is_qwen3 = Fields(config, where), "Qwen3VLForConditionalGeneration" in config["architectures"]
    vision = f.nested("vision_config") or Fields({}, f"{where}, vision_config")
    for key in ("in_channels", "in_chans"):
        vision.refuse(key, unless=(3,), why="images have three channels")
    vision.refuse("temporal_patch_size", unless=(FRAMES,), why="an image is two frames")
    hidden, depth = vision.integer("hidden_size", 1152 if is_qwen3 else 3584), vision.integer("depth", 27)
    heads, patch, merge = (
        vision.integer("num_heads", 16),
        vision.integer("patch_size", 16 if is_qwen3 else 14),
        vision.integer("spatial_merge_size", 2),
    )
    if hidden % heads or hidden // heads % 4:
        raise vision.wrong("num_heads", f"such that a head has a multiple of 4 of hidden_size = {hidden}")
    if vision.integer("out_hidden_size", spec.hidden_size) != spec.hidden_size:
        raise vision.wrong("out_hidden_size", f"the decoder's hidden_size = {spec.hidden_size}")
    token_id = f.integer("image_token_id", 151_655, minimum=0)
    if token_id >= spec.vocab_size:
        raise f.wrong("image_token_id", f"below vocab_size = {spec.vocab_size}")
    rope = vision.nested("rope_parameters") or Fields({}, f"{where}, rope_parameters")
    shared: dict[str, Any] = {
        "kind": "qwen_vl", "hidden_size": hidden, "num_layers": depth, "num_heads": heads, "eps": 1e-6,
        "intermediate_size": vision.integer("intermediate_size", 4304 if is_qwen3 else 3420),
        "activation": vision.text("hidden_act", "gelu_pytorch_tanh" if is_qwen3 else "silu"), "image_size": 0,
        "patch_size": patch, "merge": merge, "text_hidden_size": spec.hidden_size, "image_token_id": token_id,
        "theta": rope.number("rope_theta", 10_000.0), "axes": _axes(f, spec, interleaved=is_qwen3),
    }  # fmt: skip
    if is_qwen3:
        deepstack = vision.integers("deepstack_visual_indexes")
        if len(set(deepstack)) < len(deepstack) or any(not 0 <= index < depth for index in deepstack):
            raise vision.wrong("deepstack_visual_indexes", f"different layers below depth = {depth}")
        if len(deepstack) >= spec.num_layers:
            raise vision.wrong(
                "deepstack_visual_indexes", f"fewer than the {spec.num_layers} layers of the decoder"
            )
        positions = vision.integer("num_position_embeddings", 2304)
        side = int(positions**0.5)
        if side * side != positions:
            raise vision.wrong("num_position_embeddings", "a square")
        return VisionSpec(**shared, deepstack=tuple(deepstack), num_positions=positions)
    window = vision.integer("window_size", 112) // merge // patch
    if window < 1:
        raise vision.wrong("window_size", f"at least {merge * patch} pixels")
    full_layers = vision.integers("fullatt_block_indexes")
    return VisionSpec(**shared, gated=True, window=window, whole_layers=tuple(full_layers))


def _axes(f: Fields, spec: ModelSpec, *, interleaved: bool) -> tuple[int, ...]:
    """Return the axis (0: time, 1: height, 2: width) that turns each pair of a head."""
    scaling = scaling_fields(f.nested("text_config") or f)
    attention = spec.layers[0].attention
    assert attention.rope is not None
    num_pairs, default = attention.rope.dim // 2, (24, 20, 20) if interleaved else (16, 24, 24)
    sections = scaling.integers("mrope_section") if scaling.has("mrope_section") else default
    if len(sections) != 3 or sum(sections) != num_pairs:
        raise ModelLoadError(
            f"{scaling.where}: mrope_section = {list(sections)} must be three numbers whose sum is {num_pairs}, half "
            "of a head. Correct the file or download the model again."
        )
    if not interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(num_pairs))


def encoder_shapes(spec: VisionSpec) -> dict[str, tuple[int, ...]]:
    """As `quire.families.vision.encoder_shapes`."""
    hidden, inter, patch = spec.hidden_size, spec.intermediate_size, spec.patch_size
    merged, is_gated = hidden * spec.merge**2, spec.gated
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": (hidden, 3, FRAMES, patch, patch)}
    if spec.num_positions:
        shapes |= {"patch_embed.proj.bias": (hidden,), "pos_embed.weight": (spec.num_positions, hidden)}
    layer = _linears({"attn.qkv": (3 * hidden, hidden), "attn.proj": (hidden, hidden)})
    if is_gated:
        layer |= _linears({"mlp.gate_proj": (inter, hidden), "mlp.up_proj": (inter, hidden)})
        layer |= _linears({"mlp.down_proj": (hidden, inter)}) | {f"norm{i}.weight": (hidden,) for i in (1, 2)}
        merger = {**_linears({"mlp.0": (merged, merged)}), "ln_q.weight": (hidden,)}
        merger |= _linears({"mlp.2": (spec.text_hidden_size, merged)})
    else:
        layer |= _linears({"mlp.linear_fc1": (inter, hidden), "mlp.linear_fc2": (hidden, inter)})
        layer |= {f"norm{i}.{name}": (hidden,) for i in (1, 2) for name in ("weight", "bias")}
        merger = _merger(spec, hidden)
    for index in range(spec.num_layers):
        shapes |= {f"blocks.{index}.{name}": shape for name, shape in layer.items()}
    shapes |= {f"merger.{name}": shape for name, shape in merger.items()}
    for index in range(len(spec.deepstack)):
        shapes |= {f"deepstack_merger_list.{index}.{name}": s for name, s in _merger(spec, merged).items()}
    return {f"visual.{name}": shape for name, shape in shapes.items()}


def _merger(spec: VisionSpec, norm_size: int) -> dict[str, tuple[int, ...]]:
    merged = spec.hidden_size * spec.merge**2
    linears = _linears({"linear_fc1": (merged, merged), "linear_fc2": (spec.text_hidden_size, merged)})
    return {**linears, "norm.weight": (norm_size,), "norm.bias": (norm_size,)}


def _linears(shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    made: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in shapes.items()}
    return made | {f"{name}.bias": shape[:1] for name, shape in shapes.items()}


def read_preprocessing(config: Mapping[str, Any], vision: VisionSpec, where: str) -> Preprocessing:
    """As `quire.families.vision.read_preprocessing`."""
    f = Fields(config, where)
    f.refuse("image_processor_type", unless=_PROCESSORS, why="each kind cuts images in its own way")
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        f.refuse(key, unless=(True,), why="every image is resized, rescaled, normalized and made RGB")
    for key, value in (
        ("patch_size", vision.patch_size),
        ("merge_size", vision.merge),
        ("temporal_patch_size", FRAMES),
    ):
        f.refuse(key, unless=(value,), why="config.json says otherwise")
    f.refuse("resample", unless=tuple(range(6)), why="Pillow has no such filter")
    size = f.nested("size") or Fields({}, f"{where}, size")
    least = f.integer("min_pixels", size.integer("shortest_edge", 56 * 56))
    most = f.integer("max_pixels", size.integer("longest_edge", 28 * 28 * 1280))
    if not least <= most:
        raise f.wrong("max_pixels", f"at least min_pixels = {least}")
    mean, std = (
        f.numbers(key, 3) if f.has(key) else default
        for key, default in (("image_mean", _CLIP_MEAN), ("image_std", _CLIP_STD))
    )
    return Preprocessing(
        size=0, tile=0, splits=False, resample=f.integer("resample", 3, minimum=0),
        rescale=f.number("rescale_factor", 1 / 255), mean=mean, std=std, min_pixels=least, max_pixels=most,
    )  # fmt: skip

"""Tensors of the formats in `quire.families.rare_quantization`: their names, shapes and types, and what holds them.

    bitsandbytes   weight uint8 [numbers / 2, 1], a byte's first number in its high half; weight.absmax per block of
                   the flat matrix, in 8 bits with double quantization; weight.quant_map, 16 levels. LLM.int8: weight
                   int8 [out, in], SCB fp32 [out], w = q · SCB / 127
    hqq            W_q of the matrix as [groups, group] (axis 1) or [group, groups] (axis 0), whose rows are packed into
                   each other's high bits; w = scale · (q − zero)
    nvfp4          e2m1 in uint8 [out, in / 2], the first number of a byte in its low half; an e4m3 per 16 inputs; and
                   one fp32, which compressed-tensors divides by and ModelOpt multiplies with

bitsandbytes' levels are no multiples of one step, and groups of HQQ's axis 0 are inputs that lie apart: both are
expanded and rounded to int8 in groups of 32. Torch-free; loaded for such a file alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from quire.errors import ModelLoadError
from quire.families import Take
from quire.families.quantization_scheme import Scheme
from quire.models.safetensors_file import StoredTensor
from quire.weight_format import WeightFormat

_HQQ_META = (
    "nbits", "group_size", "shape", "axis", "packing", "unpack_view_dtype", "view_as_float", "quant_scale",
    "quant_zero", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config", "channel_wise",
    "optimize", "round_zero",
)  # fmt: skip
# Suffix after the module's name. What Quire does not need of a format is named as well.
PARTS: Mapping[str, Mapping[str, str]] = {
    "bnb4": {
        "q": "weight", "scale": "weight.absmax", "levels": "weight.quant_map",
        "state_nf4": "weight.quant_state.bitsandbytes__nf4", "state_fp4": "weight.quant_state.bitsandbytes__fp4",
        "scale_scale": "weight.nested_absmax", "scale_levels": "weight.nested_quant_map",
    },
    "bnb8": {"q": "weight", "scale": "SCB", "layout": "weight_format"},
    "hqq": {"q": "W_q", "scale": "scale", "zero": "zero", **{name: name for name in _HQQ_META}},
    "nvfp4": {
        "q": "weight_packed", "scale": "weight_scale", "global": "weight_global_scale", "input": "input_global_scale",
    },
    "modelopt": {"q": "weight", "scale": "weight_scale", "global": "weight_scale_2", "input": "input_scale"},
}  # fmt: skip
NEEDED: Mapping[str, tuple[str, ...]] = {
    "bnb4": ("q", "scale", "levels"), "bnb8": ("q", "scale"), "hqq": ("q", "scale", "zero"),
    "nvfp4": ("q", "scale", "global"), "modelopt": ("q", "scale", "global"),
}  # fmt: skip
TYPES = {"bnb4": "uint8", "bnb8": "int8", "nvfp4": "uint8", "modelopt": "uint8"}
WHAT = {
    "bnb4": "4 bits of bitsandbytes", "bnb8": "int8 of bitsandbytes", "hqq": "HQQ", "nvfp4": "NVFP4",
    "modelopt": "NVFP4",
}  # fmt: skip


EXPANDED = "expanded, and rounded again to int8 in groups of 32"
HELD = {
    "bnb8": "as int8 with a scale per 32 inputs; outliers of activations are not computed apart in fp16",
    "hqq": "with the same numbers, as int4 or int8 with offsets",
    "nvfp4": "as int8 in groups of 16, twice the bytes of the file; activations are int8, not fp4",
    "modelopt": "as int8 in groups of 16, twice the bytes of the file; activations are int8, not fp4",
}


def held_as_rare(take: Take, scheme: Scheme) -> tuple[WeightFormat, bool]:
    """Return the format that holds a matrix, and whether its numbers are rounded again for it."""
    in_features = take.shape[1]
    again = WeightFormat("int8", None if in_features % 32 else 32)
    if scheme.encoding == "bnb8":
        return again, False
    if scheme.encoding in ("nvfp4", "modelopt"):
        return WeightFormat("int8", scheme.group), False
    group = scheme.group or in_features
    if scheme.encoding == "bnb4" or scheme.strided or in_features % group or group % 32:
        return again, True
    kind, largest = (
        ("int4" if scheme.bits <= 4 else "int8"),
        next(size for size in (128, 64, 32) if group % size == 0),
    )
    return WeightFormat(kind, largest, has_offset=True), False  # type: ignore[arg-type]


def check_rare(
    take: Take, scheme: Scheme, parts: Mapping[str, str], stored: Mapping[str, StoredTensor]
) -> None:
    """Check the sizes and the types of the parts of one matrix.

    Raises:
        ModelLoadError: names the tensor and what its size should be.
    """
    out, in_ = take.shape
    count = out * in_
    sizes: dict[str, tuple[int, ...]] = {"q": (count,)}
    if scheme.encoding == "bnb4":
        sizes = {"q": (count // 2,), "levels": (16,)}
    elif scheme.encoding == "bnb8":
        sizes["scale"] = (out,)
    elif scheme.encoding == "hqq":
        groups = count // (scheme.group or in_)
        sizes = {"scale": (groups,), "zero": (groups,)}
    else:
        sizes = {"q": (count // 2,), "scale": (count // (scheme.group or in_),), "global": (1,)}
    for part, name in parts.items():
        tensor = stored[name]
        size = 1
        for length in tensor.shape:
            size *= length
        if part in sizes and size != sizes[part][0]:
            raise ModelLoadError(
                f"{tensor.file}: {name} has {size:,} numbers, and {sizes[part][0]:,} belong to a matrix "
                f"{list(take.shape)} in {WHAT[scheme.encoding]}; config.json and weights do not belong together."
            )


def remarks_of(matrices: Iterable[tuple[str, bool]]) -> tuple[str, ...]:
    """Return a line per format about how its ``matrices``, (encoding, expanded), are held, and what that costs."""
    return tuple(
        f"matrices in {WHAT[encoding]}: {count}, " + (EXPANDED if expanded else HELD[encoding])
        for (encoding, expanded), count in Counter(matrices).items()
    )

"""``quantization_config`` of formats that Quire reads and does not hold as they are: bitsandbytes, HQQ, NVFP4.

Loaded for such a config alone. As in `quire.families.quantization`, a key is honoured, known to change no weight, or
refused by name. Rounding of activations that these files ask for (outliers of LLM.int8 in fp16, NVFP4's static scales)
is not done: rows are int8 with a scale per 32 inputs, as for every format with groups. Torch-free.
"""

from __future__ import annotations

from dataclasses import replace

from quire.errors import UnsupportedModelError
from quire.families.quantization_scheme import Quantization, Scheme, refuse_unknown
from quire.families.shape import Fields

_NVFP4 = Scheme("nvfp4", 4, 16, symmetric=True)
_BITSANDBYTES = {
    "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_quant_storage",
    # What follows decides how activations are computed elsewhere, or is written in the tensors as well.
    "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype", "llm_int8_threshold", "llm_int8_skip_modules",
    "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight", "_load_in_4bit", "_load_in_8bit",
}  # fmt: skip


def read_rare(method: str, f: Fields) -> Quantization:
    """Return the quantization of a config of ``method``, one of bitsandbytes, hqq and modelopt.

    Raises:
        UnsupportedModelError: a value is not read; the message names it.
    """
    return {"bitsandbytes": _bitsandbytes, "hqq": _hqq, "modelopt": _modelopt}[method](f)


def _bitsandbytes(f: Fields) -> Quantization:
    refuse_unknown(f, _BITSANDBYTES | {"quant_method"})
    if f.flag("load_in_8bit"):
        f.refuse("llm_int8_has_fp16_weight", unless=(False,), why="the weights must be stored quantized")
        return Quantization((("Linear", Scheme("bnb8", 8, None, symmetric=True)),))
    f.refuse("bnb_4bit_quant_type", unless=("nf4", "fp4"), why="bitsandbytes has these tables of 16 levels")
    f.refuse("bnb_4bit_quant_storage", unless=("uint8",), why="other types hide the same bytes in floats")
    return Quantization((("Linear", Scheme("bnb4", 4, None, symmetric=True)),))


def _hqq(f: Fields) -> Quantization:
    refuse_unknown(f, {"quant_method", "quant_config", "skip_modules"})
    config = f.nested("quant_config")
    if config is None:
        raise f.wrong("quant_config", "an object with weight_quant_params")
    refuse_unknown(config, {"weight_quant_params"})
    weights = config.nested("weight_quant_params")
    if weights is None:
        raise UnsupportedModelError(
            f"{config.where}: quant_config has no weight_quant_params: settings of single modules are not read."
        )
    refuse_unknown(
        weights, {"nbits", "group_size", "axis", "channel_wise", "optimize", "round_zero", "view_as_float"}
    )
    weights.refuse("nbits", unless=(1, 2, 3, 4, 5, 6, 8), why="HQQ packs these")
    weights.refuse("axis", unless=(0, 1), why="a matrix has two")
    weights.refuse("channel_wise", unless=(True,), why="one scale for a whole matrix is not read")
    weights.refuse("view_as_float", unless=(False,), why="the bytes would be hidden in floats")
    axis, group = weights.integer("axis", minimum=0), weights.optional_integer("group_size", minimum=1)
    if axis == 0 and group is None:
        raise UnsupportedModelError(
            f"{weights.where}: axis = 0 without a group_size, a scale per input, is not read."
        )
    scheme = Scheme("hqq", weights.integer("nbits"), group, symmetric=False, strided=axis == 0)
    return Quantization((("Linear", scheme),))


def _modelopt(f: Fields) -> Quantization:
    f.refuse(
        "quant_algo",
        unless=("NVFP4",),
        why="of ModelOpt's formats this one is read; else take the plain checkpoint with --quantize int8",
    )
    f.refuse("kv_cache_scheme", unless=(), why="the KV cache is not quantized")
    f.refuse("kv_cache_quant_algo", unless=(), why="the KV cache is not quantized")
    # config_groups says again what quant_algo says; producer is the program that wrote the file.
    refuse_unknown(
        f,
        {
            "quant_method",
            "quant_algo",
            "config_groups",
            "ignore",
            "producer",
            "group_size",
            "exclude_modules",
        },
    )
    f.refuse("group_size", unless=(_NVFP4.group,), why="NVFP4 has groups of it")
    ignore = tuple(str(item) for item in f.items("ignore"))
    f.items("exclude_modules")  # the checkpoint itself shows which modules are plain
    scheme = replace(_NVFP4, encoding="modelopt")
    return Quantization((("Linear", scheme),), tuple(name for name in ignore if "*" not in name))


def nvfp4_scheme(f: Fields) -> Scheme:
    """Return the scheme of a group of compressed-tensors in NVFP4."""
    refuse_unknown(f, {"targets", "weights", "input_activations", "output_activations", "format"})
    f.refuse("output_activations", unless=(), why="outputs of linears are not quantized")
    w = f.nested("weights")
    if w is None:
        raise f.wrong("weights", "an object")
    w.refuse("type", unless=("float",), why="NVFP4 has floats")
    w.refuse("num_bits", unless=(4,), why="NVFP4 has 4")
    w.refuse("group_size", unless=(_NVFP4.group,), why="NVFP4 has groups of it")
    w.refuse("strategy", unless=("tensor_group",), why="NVFP4 has a scale per group under one per matrix")
    w.refuse("symmetric", unless=(True,), why="NVFP4 has no zero points")
    return _NVFP4

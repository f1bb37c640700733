"""``quantization_config`` of GPTQ, AWQ and fp8.

    awq    AutoAWQ's layouts "gemm" and "gemv", 4 bits
    gptq   AutoGPTQ's and GPTQModel's layout, 4 or 8 bits
    fp8    e4m3 with a scale per tensor or block of 128 x 128 (DeepSeek-V3, Qwen3), dynamic activations

Loaded for such a config alone. Torch-free.
"""

from __future__ import annotations

from quire.errors import UnsupportedModelError
from quire.families.quantization_scheme import (
    BLOCK,
    Quantization,
    Scheme,
    read_bits,
    read_group,
    refuse_unknown,
)
from quire.families.shape import Fields

_HARMLESS = {  # how weights were computed, hints for other engines
    "awq": {"backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config"},
    "gptq": {
        "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "model_name_or_path",
        "model_file_base_name", "meta", "batch_size", "dataset", "tokenizer", "cache_block_outputs", "exllama_config",
        "use_exllama", "max_input_length", "use_cuda_fp16", "model_seqlen", "block_name_to_quantize", "offload_to_disk",
        "module_name_preceding_first_block", "modules_in_block_to_quantize", "pad_token_id", "disable_exllama", "mse",
        "backend", "act_group_aware", "lm_head", "desc_act",
    },
    "fp8": {"scale_fmt"},  # a restriction on the scales, which are stored as numbers
}  # fmt: skip


def read_gptq_awq_fp8(method: str, f: Fields) -> Quantization:
    """Return the quantization of a config of ``method``.

    Raises:
        ModelLoadError, UnsupportedModelError: a value makes no sense, or is not read.
    """
    known, result = {"awq": _awq, "gptq": _gptq, "fp8": _fp8}[method](f)
    refuse_unknown(f, known | _HARMLESS[method] | {"quant_method"})
    return result


def _awq(f: Fields) -> tuple[set[str], Quantization]:
    old = {"w_bit": "bits", "q_group_size": "group_size"}
    f = Fields({old.get(key, key): value for key, value in f.values.items()}, f.where)
    bits = read_bits(f, "bits", (4,))
    version = f.text("version", "gemm").lower()
    if version not in ("gemm", "gemv"):
        raise UnsupportedModelError(
            f"{f.where}: version = {version!r} is not supported; it must be 'gemm' or 'gemv'. Other versions have an "
            "order of weights that belongs to kernels for GPUs. Take a checkpoint of version 'gemm', or the plain one "
            "with --quantize int4."
        )
    f.items("modules_to_not_convert")  # the checkpoint itself shows which modules are plain
    known = {"bits", "group_size", "version", "zero_point", "modules_to_not_convert", *old}
    f.refuse("zero_point", unless=(True,), why="this layout has zero points")
    scheme = Scheme(
        "awq" if version == "gemm" else "awq_gemv", bits, read_group(f, "group_size"), symmetric=False
    )
    return known, Quantization((("Linear", scheme),))


def _gptq(f: Fields) -> tuple[set[str], Quantization]:
    bits = read_bits(f, "bits", (4, 8))
    form = f.text("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise UnsupportedModelError(
            f"{f.where}: checkpoint_format = {form!r} is not supported; it must be 'gptq' or 'gptq_v2'."
        )
    f.refuse("pack_dtype", unless=("int32",), why="only eight 4-bit numbers per word are read")
    f.refuse("format", unless=(form,), why="it contradicts checkpoint_format")
    f.refuse("is_marlin_format", unless=(False,), why="Marlin's order of weights belongs to GPU kernels")
    f.flag("desc_act", False)  # g_idx shows later whether groups are consecutive
    known = {"bits", "group_size", "sym", "checkpoint_format", "pack_dtype", "is_marlin_format", "format"}
    scheme = Scheme(
        "gptq", bits, read_group(f, "group_size"), f.flag("sym", True), zero_minus_one=form == "gptq"
    )
    return known, Quantization((("Linear", scheme),))


def _fp8(f: Fields) -> tuple[set[str], Quantization]:
    f.refuse("fmt", unless=("e4m3",), why="float8_e4m3fn is read")
    f.refuse("activation_scheme", unless=("dynamic",), why="activations are scaled per token at run time")
    block = f.items("weight_block_size")
    if block and list(block) != [BLOCK, BLOCK]:
        raise f.wrong("weight_block_size", f"[{BLOCK}, {BLOCK}]")
    for key in ("modules_to_not_convert", "ignored_layers"):
        f.items(key)  # the checkpoint itself shows which modules are plain
    known = {"fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers"}
    scheme = Scheme("fp8_inverse" if block else "fp8", 8, BLOCK if block else None, symmetric=True)
    return known, Quantization((("Linear", scheme),))

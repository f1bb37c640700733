"""``quantization_config`` of a ``config.json`` → `Quantization`: how each quantized linear of the checkpoint is stored.

Read strictly: a key is honoured, known to change no number (`_HARMLESS`), or refused by name. Torch-free.

    compressed-tensors   `quire.families.compressed_tensors`
    fp8                  e4m3 with a scale per tensor or block of 128 x 128 (DeepSeek-V3, Qwen3), dynamic activations
    awq                  AutoAWQ's "gemm" layout, 4 bits
    gptq                 AutoGPTQ's and GPTQModel's layout, 4 or 8 bits
    bitsandbytes, hqq, modelopt   `quire.families.rare_quantization`
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from quire.errors import UnsupportedModelError
from quire.families.shape import Fields

# fp8_inverse has weight_scale_inv. bnb4 and bnb8 are of bitsandbytes, nvfp4 of compressed-tensors, modelopt its nvfp4.
Encoding = Literal[
    "packed", "int8", "awq", "gptq", "fp8", "fp8_inverse", "bnb4", "bnb8", "hqq", "nvfp4", "modelopt"
]
RARE = ("bnb4", "bnb8", "hqq", "nvfp4", "modelopt")  # encodings whose readers are loaded for such a file
METHODS = ("compressed-tensors", "awq", "gptq", "fp8", "bitsandbytes", "hqq", "modelopt")
BLOCK = 128  # inputs and outputs of an fp8 block with one scale
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


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one linear is stored. ``group`` None: one scale per output feature or, for fp8, per matrix.

    ``strided``: of HQQ, whose groups may be inputs that lie apart.
    """

    encoding: Encoding
    bits: int
    group: int | None
    symmetric: bool
    zero_minus_one: bool = False  # GPTQ's first format stores zero points minus 1
    strided: bool = False


@dataclass(frozen=True, slots=True)
class Quantization:
    """The schemes of a checkpoint by target; the first that matches a module applies."""

    targets: tuple[tuple[str, Scheme], ...]
    ignore: tuple[str, ...] = ()

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the scheme of a module ("model.layers.0.mlp.up_proj"), None where it is plain."""
        if any(_matches(pattern, module) for pattern in self.ignore):
            return None
        return next((scheme for pattern, scheme in self.targets if _matches(pattern, module)), None)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern in ("Linear", module)


def read_quantization(f: Fields, *, others: tuple[str, ...] = ()) -> Quantization | None:
    """Return the quantization of ``quantization_config``; None where it is absent or its method is among ``others``.

    ``others``: methods that the family's own map of weights reads (MXFP4).

    Raises `UnsupportedModelError` for a method or a value that Quire does not read, `ModelLoadError` for wrong values.
    """
    q = f.nested("quantization_config")
    if q is None:
        return None
    method = q.text("quant_method", "an unnamed method")
    if method in others:
        return None
    if method == "bitsandbytes" and not q.flag("load_in_4bit") and not q.flag("load_in_8bit"):
        return None  # the settings of a load that quantized nothing
    if method not in METHODS:
        from quire.families.refused_formats import refusal

        raise UnsupportedModelError(f"{f.where}: {refusal(method, METHODS)}")
    if method == "compressed-tensors":
        from quire.families.compressed_tensors import read_compressed_tensors

        return read_compressed_tensors(q)
    readers = {"awq": _awq, "gptq": _gptq, "fp8": _fp8}
    if method in readers:
        known, result = readers[method](q)
        refuse_unknown(q, known | _HARMLESS[method] | {"quant_method"})
        return result
    from quire.families.rare_quantization import read_rare

    return read_rare(method, q)


def refuse_unknown(f: Fields, known: set[str]) -> None:
    """Refuse a key that is not ``known`` and that says something."""
    for key, value in f.values.items():
        if key not in known and value not in (None, {}, [], False):
            raise UnsupportedModelError(
                f"{f.where}: {key} = {value!r} is not known to Quire and might change what the weights mean."
            )


def read_bits(f: Fields, key: str, allowed: tuple[int, ...]) -> int:
    """Return the bits of a weight. Raises `UnsupportedModelError` unless they are ``allowed``."""
    bits = f.integer(key)
    f.refuse(key, unless=allowed, why="no kernel has it")
    return bits


def read_group(f: Fields, key: str) -> int | None:
    """Return the inputs that share a scale, None for a row. Raises `ModelLoadError` for 0."""
    size = f.integer(key, -1, minimum=-1)
    if size == 0:
        raise f.wrong(key, "-1 (the whole row) or an integer ≥ 1")
    return None if size == -1 else size


def _awq(f: Fields) -> tuple[set[str], Quantization]:
    old = {"w_bit": "bits", "q_group_size": "group_size"}
    f = Fields({old.get(key, key): value for key, value in f.values.items()}, f.where)
    bits = read_bits(f, "bits", (4,))
    version = f.text("version", "gemm").lower()
    if version != "gemm":
        raise UnsupportedModelError(f"{f.where}: version = {version!r} is not supported; it must be 'gemm'.")
    f.items("modules_to_not_convert")  # the checkpoint itself shows which modules are plain
    known = {"bits", "group_size", "version", "zero_point", "modules_to_not_convert", *old}
    f.refuse("zero_point", unless=(True,), why="this layout has zero points")
    scheme = Scheme("awq", bits, read_group(f, "group_size"), symmetric=False)
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

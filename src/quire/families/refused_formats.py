"""Formats of quantized checkpoints that Quire does not read: what each is, why not, and what to take instead.

Loaded for an error alone. The table of ``docs/quantization.md`` has the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Refused(NamedTuple):
    """A format that is not read."""

    name: str
    what: str
    why: str
    instead: str


_CODE_BOOK = "weights are entries of learned tables, which are no integers with a scale"
_GPU_ORDER = "its order of weights belongs to kernels for GPUs"
_PLAIN = "the plain checkpoint with --quantize int4 or int8"
_GGUF = "a GGUF file of the same size"
_DENSE = "the dense checkpoint with --quantize int4 or int8"
_PLAIN_MODEL = "a model of another family with --quantize int4"
# By quantization_config.quant_method.
REFUSED: Mapping[str, Refused] = {
    "squeezellm": Refused("SqueezeLLM", "a table of 16 numbers per row, and outliers apart", _CODE_BOOK, _GGUF),
    "quip": Refused("QuIP#", "vectors of the E8 lattice after a Hadamard rotation", _CODE_BOOK, _GGUF),
    "aqlm": Refused("AQLM", "sums of vectors from learned tables", _CODE_BOOK, _GGUF),
    "vptq": Refused("VPTQ", "vectors from learned tables", _CODE_BOOK, _GGUF),
    "spqr": Refused("SpQR", "3 bits with scales that are quantized, and sparse outliers", "outliers lie apart", _GGUF),
    "higgs": Refused("HIGGS", "vectors of a grid after a Hadamard rotation", _CODE_BOOK, _PLAIN),
    "exl2": Refused("EXL2", "ExLlamaV2's 2 to 8 bits, mixed within a matrix", _GPU_ORDER, _GGUF),
    "exl3": Refused("EXL3", "ExLlamaV3's trellis codes after a rotation", _CODE_BOOK, _GGUF),
    "marlin": Refused("Marlin", "GPTQ in the order of one kernel", _GPU_ORDER, "the GPTQ checkpoint it was made from"),
    "quanto": Refused("Quanto", "int8, int4 or fp8 of Optimum", "its tensors are classes of Optimum", _PLAIN),
    "torchao": Refused("torchao", "int4, int8 or fp8 of PyTorch", "its tensors are classes of torchao", _PLAIN),
    "eetq": Refused("EETQ", "int8 per row in the order of one kernel", _GPU_ORDER, _PLAIN),
    "quark": Refused("Quark", "fp8, int8 or MX formats of AMD", "its scales of activations are fixed", _PLAIN),
    "fbgemm_fp8": Refused("FBGEMM fp8", "fp8 per row", "its activations have an upper bound", _PLAIN),
    "auto-round": Refused("AutoRound", "its own int2 to int8", "its layout is its own", "its GPTQ, AWQ or GGUF export"),
    "bitnet": Refused("BitNet", "ternary weights, trained so", "its layers have norms of their own", _PLAIN_MODEL),
    "sparse24": Refused("2:4 sparsity", "two weights of four, and where they are", "zeros are not left out", _DENSE),
    "mxfp4": Refused("MXFP4", "fp4 in blocks of 32", "safetensors of it are read for gpt-oss alone", "GGUF in MXFP4"),
}  # fmt: skip


def refusal(method: str, supported: Sequence[str]) -> str:
    """Return what the format of ``method`` is, why it is not read, and what to take instead."""
    refused = REFUSED.get(method)
    known = ""
    if refused is not None:
        known = f"{refused.name} is {refused.what}; it is not read because {refused.why}. Take {refused.instead}. "
    return (
        f"weights quantized by {method!r} (quantization_config.quant_method) are not supported. {known}Supported are "
        f"{', '.join(supported)}, mxfp4 for gpt-oss, GGUF files, and plain weights with --quantize."
    )

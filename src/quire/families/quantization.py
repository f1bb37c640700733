"""``quantization_config`` of a ``config.json`` → `Quantization`: how each quantized linear of the checkpoint is stored.

Read strictly: a key is honoured, known to change no number, or refused by name. Each reader is loaded for such a config
alone. Torch-free.
"""

from __future__ import annotations

from quire.errors import UnsupportedModelError
from quire.families.quantization_scheme import Quantization
from quire.families.shape import Fields

METHODS = ("compressed-tensors", "awq", "gptq", "fp8", "bitsandbytes", "hqq", "modelopt")
_QUIP = Fields({"quant_method": "quip"})  # its checkpoints have no quantization_config


def read_quantization(f: Fields, *, others: tuple[str, ...] = ()) -> Quantization | None:
    """Return the quantization of ``quantization_config``; None where it is absent or its method is among ``others``.

    ``others``: methods that the family's own map of weights reads (MXFP4).

    Raises `UnsupportedModelError` for a method or a value that Quire does not read, `ModelLoadError` for wrong values.
    """
    q = f.nested("quantization_config") or (_QUIP if f.has("quip_params") else None)
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
    if method in ("awq", "gptq", "fp8"):
        from quire.families.gptq_awq_fp8 import read_gptq_awq_fp8

        return read_gptq_awq_fp8(method, q)
    from quire.families.rare_quantization import read_rare

    return read_rare(method, q)

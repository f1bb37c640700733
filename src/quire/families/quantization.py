"""``quantization_config`` of a ``config.json`` → `Quantization`: how each quantized linear of the checkpoint is stored.

Read strictly: a key is honoured, known to change no number (`_HARMLESS`), or refused by name. Torch-free.

    compressed-tensors   pack-quantized (int4 or int8 in int32), int-quantized and float-quantized (W8A8), by target and
                         ignore list
    fp8                  e4m3 with a scale per tensor or block of 128 x 128 (DeepSeek-V3, Qwen3), dynamic activations
    awq                  AutoAWQ's "gemm" layout, 4 bits
    gptq                 AutoGPTQ's and GPTQModel's layout, 4 or 8 bits
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from quire.errors import UnsupportedModelError
from quire.families.shape import Fields

Encoding = Literal["packed", "int8", "awq", "gptq", "fp8", "fp8_inverse"]  # the last: weight_scale_inv
METHODS = ("compressed-tensors", "awq", "gptq", "fp8")
BLOCK = 128  # inputs and outputs of an fp8 block with one scale
_HARMLESS = {  # how weights were computed, hints for other engines
    "compressed-tensors": {"global_compression_ratio", "version", "quantization_status"},
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
_WEIGHT_KEYS = {"num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder", "block_structure",
                "observer", "observer_kwargs", "scale_dtype", "zp_dtype"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one linear is stored. ``group`` None: one scale per output feature or, for fp8, per matrix."""

    encoding: Encoding
    bits: int
    group: int | None
    symmetric: bool
    zero_minus_one: bool = False  # GPTQ's first format stores zero points minus 1


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
    read = {"compressed-tensors": _compressed_tensors, "awq": _awq, "gptq": _gptq, "fp8": _fp8}[method]
    known, result = read(q)
    _refuse_unknown(q, known | _HARMLESS[method] | {"quant_method"})
    return result


def _refuse_unknown(f: Fields, known: set[str]) -> None:
    for key, value in f.values.items():
        if key not in known and value not in (None, {}, [], False):
            raise UnsupportedModelError(
                f"{f.where}: {key} = {value!r} is not known to Quire and might change what the weights mean."
            )


def _bits(f: Fields, key: str, allowed: tuple[int, ...]) -> int:
    bits = f.integer(key)
    f.refuse(key, unless=allowed, why="no kernel has it")
    return bits


def _group(f: Fields, key: str) -> int | None:
    size = f.integer(key, -1, minimum=-1)
    if size == 0:
        raise f.wrong(key, "-1 (the whole row) or an integer ≥ 1")
    return None if size == -1 else size


def _awq(f: Fields) -> tuple[set[str], Quantization]:
    old = {"w_bit": "bits", "q_group_size": "group_size"}
    f = Fields({old.get(key, key): value for key, value in f.values.items()}, f.where)
    bits = _bits(f, "bits", (4,))
    version = f.text("version", "gemm").lower()
    if version != "gemm":
        raise UnsupportedModelError(f"{f.where}: version = {version!r} is not supported; it must be 'gemm'.")
    f.items("modules_to_not_convert")  # the checkpoint itself shows which modules are plain
    known = {"bits", "group_size", "version", "zero_point", "modules_to_not_convert", *old}
    f.refuse("zero_point", unless=(True,), why="this layout has zero points")
    scheme = Scheme("awq", bits, _group(f, "group_size"), symmetric=False)
    return known, Quantization((("Linear", scheme),))


def _gptq(f: Fields) -> tuple[set[str], Quantization]:
    bits = _bits(f, "bits", (4, 8))
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
    scheme = Scheme("gptq", bits, _group(f, "group_size"), f.flag("sym", True), zero_minus_one=form == "gptq")
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


def _compressed_tensors(f: Fields) -> tuple[set[str], Quantization]:
    f.refuse("quantization_status", unless=("compressed",), why="the weights must be stored quantized")
    f.refuse("kv_cache_scheme", unless=(), why="the KV cache is not quantized")
    sparsity = f.nested("sparsity_config")
    if sparsity is not None:
        sparsity.refuse("format", unless=("dense",), why="sparse weights are not read")
    top = f.text("format", "pack-quantized")
    groups = f.nested("config_groups")
    if groups is None or not groups.values:
        raise f.wrong("config_groups", "an object of at least one group")
    targets: list[tuple[str, Scheme]] = []
    for name in groups.values:
        group = groups.nested(name)
        if group is None:
            raise groups.wrong(name, "an object")
        scheme = _group_scheme(group, top)
        for target in group.items("targets"):
            if not isinstance(target, str) or (
                target != "Linear" and ":" not in target and "." not in target
            ):
                raise UnsupportedModelError(
                    f"{group.where}: targets has {target!r}, which is not supported; it must be 'Linear', the name "
                    "of a module, or 're:' and a pattern."
                )
            targets.append((target, scheme))
    # Names are more specific than the class of all linears.
    targets.sort(key=lambda each: each[0] == "Linear")
    ignore = tuple(str(item) for item in f.items("ignore"))
    known = {"config_groups", "format", "ignore", "kv_cache_scheme", "sparsity_config"}
    return known, Quantization(tuple(targets), ignore)


def _group_scheme(f: Fields, top: str) -> Scheme:
    form = f.text("format", top)
    forms = ("pack-quantized", "int-quantized", "float-quantized")
    if form not in forms:
        raise UnsupportedModelError(
            f"{f.where}: format = {form!r} is not supported; it must be one of {', '.join(forms)}."
        )
    _refuse_unknown(f, {"targets", "weights", "input_activations", "output_activations", "format"})
    f.refuse("output_activations", unless=(), why="outputs of linears are not quantized")
    w = f.nested("weights")
    if w is None:
        raise f.wrong("weights", "an object")
    _refuse_unknown(w, _WEIGHT_KEYS)
    fp8 = form == "float-quantized"
    w.refuse("type", unless=("float",) if fp8 else ("int",), why=f"the format is {form}; fp4 is not read")
    w.refuse("dynamic", unless=(False,), why="weights have stored scales")
    if fp8:
        return _float_scheme(f, w)
    w.refuse("block_structure", unless=(), why="scales are a row's or a group's")
    w.refuse(
        "actorder", unless=(False, True, "weight", "static", "group", "dynamic"), why="g_idx has the groups"
    )
    bits = _bits(w, "num_bits", (4, 8) if form == "pack-quantized" else (8,))
    group = _group(w, "group_size")
    strategy = w.text("strategy", "channel" if group is None else "group")
    if strategy not in ("channel", "group") or (strategy == "group") != (group is not None):
        raise UnsupportedModelError(
            f"{w.where}: strategy = {strategy!r} with group_size = {w.values.get('group_size')!r} is not supported; it "
            "must be 'channel' without a group_size, or 'group' with one."
        )
    _activations(f)
    return Scheme("packed" if form == "pack-quantized" else "int8", bits, group, w.flag("symmetric", True))


def _float_scheme(f: Fields, w: Fields) -> Scheme:
    """Return the scheme of 8-bit floats with a scale per matrix, output feature or block."""
    _bits(w, "num_bits", (8,))
    strategy = w.text("strategy", "channel")
    blocks = strategy == "block"
    w.refuse("strategy", unless=("tensor", "channel", "block"), why="fp8 has a scale for each of these")
    w.refuse("symmetric", unless=(True,), why="fp8 has no zero points")
    if blocks and list(w.items("block_structure")) != [BLOCK, BLOCK]:
        raise w.wrong("block_structure", f"[{BLOCK}, {BLOCK}]")
    _activations(f, "float", ("group",) if blocks else ("token",))
    return Scheme("fp8", 8, BLOCK if blocks else None, symmetric=True)


def _activations(f: Fields, kind: str = "int", strategies: tuple[str, ...] = ("token",)) -> None:
    """Check that quantized activations are absent or as in the kernels: 8 bits, a scale per token at run time."""
    a = f.nested("input_activations")
    if a is None:
        return
    why = "activations have 8 bits and a scale per token, computed at run time"
    _refuse_unknown(a, _WEIGHT_KEYS)
    a.refuse("num_bits", unless=(8,), why=why)
    a.refuse("type", unless=(kind,), why=why)
    a.refuse("symmetric", unless=(True,), why=why)
    a.refuse("strategy", unless=strategies, why=why)
    if strategies == ("group",):
        a.refuse("group_size", unless=(BLOCK,), why="it is the block's")
    a.refuse("dynamic", unless=(True,), why=why)
    if a.values.get("dynamic") is not True:
        raise a.wrong("dynamic", "true")

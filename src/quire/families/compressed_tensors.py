"""``quantization_config`` of compressed-tensors: groups of schemes by target, and a list of modules that are plain.

pack-quantized (2, 3, 4 or 8 bits in int32), int-quantized and float-quantized (W8A8), and NVFP4. Loaded for such a
config alone. Torch-free.
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
from quire.families.rare_quantization import nvfp4_scheme
from quire.families.shape import Fields

# Those that are read, and what says how weights were computed or hints at other engines.
_KEYS = {
    "config_groups", "format", "ignore", "kv_cache_scheme", "sparsity_config", "quant_method",
    "global_compression_ratio", "version", "quantization_status",
}  # fmt: skip
_WEIGHT_KEYS = {"num_bits", "type", "symmetric", "strategy", "group_size", "dynamic", "actorder", "block_structure",
                "observer", "observer_kwargs", "scale_dtype", "zp_dtype"}  # fmt: skip


def read_compressed_tensors(f: Fields) -> Quantization:
    """Return the schemes of a config. Raises `UnsupportedModelError` and `ModelLoadError`, naming the key."""
    f.refuse("quantization_status", unless=("compressed",), why="the weights must be stored quantized")
    f.refuse("kv_cache_scheme", unless=(), why="the KV cache is not quantized")
    sparsity = f.nested("sparsity_config")
    if sparsity is not None:
        sparsity.refuse("format", unless=("dense",), why="take the dense checkpoint with --quantize")
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
    targets.sort(key=lambda target: target[0] == "Linear")
    ignore = tuple(str(item) for item in f.items("ignore"))
    refuse_unknown(f, _KEYS)
    return Quantization(tuple(targets), ignore)


def _group_scheme(f: Fields, top: str) -> Scheme:
    form = f.text("format", top)
    forms = ("pack-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized")
    if form == forms[3]:
        return nvfp4_scheme(f)
    if form not in forms:
        raise UnsupportedModelError(
            f"{f.where}: format = {form!r} is not supported; it must be one of {', '.join(forms)}."
        )
    refuse_unknown(f, {"targets", "weights", "input_activations", "output_activations", "format"})
    f.refuse("output_activations", unless=(), why="outputs of linears are not quantized")
    w = f.nested("weights")
    if w is None:
        raise f.wrong("weights", "an object")
    refuse_unknown(w, _WEIGHT_KEYS)
    fp8 = form == "float-quantized"
    w.refuse("type", unless=("float",) if fp8 else ("int",), why=f"the format is {form}; fp4 is not read")
    w.refuse("dynamic", unless=(False,), why="weights have stored scales")
    if fp8:
        return _float_scheme(f, w)
    w.refuse("block_structure", unless=(), why="scales are a row's or a group's")
    w.refuse(
        "actorder", unless=(False, True, "weight", "static", "group", "dynamic"), why="g_idx has the groups"
    )
    bits = read_bits(w, "num_bits", (2, 3, 4, 8) if form == "pack-quantized" else (8,))
    group = read_group(w, "group_size")
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
    read_bits(w, "num_bits", (8,))
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
    refuse_unknown(a, _WEIGHT_KEYS)
    a.refuse("num_bits", unless=(8,), why=why)
    a.refuse("type", unless=(kind,), why=why)
    a.refuse("symmetric", unless=(True,), why=why)
    a.refuse("strategy", unless=strategies, why=why)
    if strategies == ("group",):
        a.refuse("group_size", unless=(BLOCK,), why="it is the block's")
    a.refuse("dynamic", unless=(True,), why=why)
    if a.values.get("dynamic") is not True:
        raise a.wrong("dynamic", "true")

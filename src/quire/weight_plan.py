"""Decisions per matrix before a weight is read: its format (`plan_weights`), and may LoRA change it. Torch-free.

The matrices of linears are quantized, and a table that is stored so. Norms, biases and sinks are not matrices; an error
in the choice of a router or a gate is never small; MLA's ``kv_b`` is multiplied head by head; of a separate embedding
table a token reads one row, and so of the embeddings per layer, whose matrices are small. What the gates and the
convolution of a recurrent layer get wrong stays in its state.

An adapter may change the linears of attention, of dense MLPs and of shared experts, the embedding and the output
matrix: not routers, experts and MLA's ``kv_b``, which is multiplied into two other products.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from quire.errors import ConfigError
from quire.modelspec import DTYPE_BYTES, ModelSpec, weight_shapes
from quire.request import Adapter
from quire.weight_format import GROUPS, PLAIN, TWO_LEVEL_GROUP, Kind, WeightFormat

Role = Literal["linear", "head", "table", "other"]
Formats = Mapping[str, WeightFormat]
_NEVER = (
    ".router.weight", ".shared_gate.weight", ".kv_b.weight", ".delta.a.weight", ".delta.b.weight", ".mamba.dt.weight",
    ".kda.f.weight", ".kda.f_a.weight", ".kda.f_b.weight", ".kda.b.weight",
    ".taps.weight", *(f".conv_{part}.weight" for part in "qkvxbc"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """``formats``: canonical name → format of every matrix that is quantized; all else is plain."""

    formats: dict[str, WeightFormat] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()  # deviations from the request, with their reasons


def role_of(spec: ModelSpec, name: str) -> Role:
    """Return the role of a weight: a linear, the output matrix, a table that is only looked up, or not quantizable."""
    if name == "lm_head.weight" or (name == "embed.weight" and spec.tie_word_embeddings):
        return "head"
    if name in ("embed.weight", "per_layer.table.weight"):
        return "table"
    if not name.endswith(".weight") or name.endswith(("norm.weight", *_NEVER)) or "per_layer." in name:
        return "other"
    return "linear"


def plan_weights(
    spec: ModelSpec, stored: Formats, quantize: str | None, quantize_head: str | None
) -> WeightPlan:
    """Decide from the formats that the checkpoint has ``stored`` and from the user's request.

    ``quantize`` None keeps the stored formats; "none" expands them; "int8", "int4", "int4-g64" … quantize a plain
    checkpoint while it is loaded. The output matrix gets 8 bits without a ``quantize_head``, as `_wide` ones of "int4".

    Raises:
        ConfigError: names the setting, the value and what is allowed.
    """
    wanted = None if quantize is None else parse_format(quantize, name="quantize")
    head = None if quantize_head is None else parse_format(quantize_head, name="quantize_head")
    if stored and wanted is not None and wanted.quantized:
        raise ConfigError(
            f"quantize = {quantize!r}: the checkpoint is quantized already ({kinds_of(stored)}); leave quantize out "
            "to run it as it is, or give 'none' to expand it"
        )
    formats = dict(stored) if wanted is None else {}
    if wanted is not None and wanted.quantized:
        formats = {name: wanted for name in weight_shapes(spec) if role_of(spec, name) == "linear"}
        wide = formats.keys() & (_wide(spec.num_layers) if quantize == "int4" else ())
        formats |= dict.fromkeys(wide, WeightFormat("int8"))
        head = head or WeightFormat("int8")
    head_name = "embed.weight" if spec.tie_word_embeddings else "lm_head.weight"
    if head is not None:
        if head_name in stored and head != stored[head_name] and head.quantized:
            raise ConfigError(
                f"quantize_head = {quantize_head!r}: the checkpoint has its output matrix quantized already "
                f"({stored[head_name]}); leave it out, or give 'none' to expand it"
            )
        formats[head_name] = head
    return _fit(spec, {name: form for name, form in formats.items() if form.quantized})


def _wide(num_layers: int) -> Iterator[str]:
    """Yield what loses most in 4 bits: k, v, and down of the layers that have more bits in llama.cpp's Q4_K_M."""
    eighth = num_layers // 8
    for i in range(num_layers):
        yield from (f"layers.{i}.attn.{part}.weight" for part in "kv")
        if i < eighth or i >= 7 * num_layers // 8 or (i - eighth) % 3 == 2:
            yield f"layers.{i}.mlp.down.weight"


def parse_format(text: str, *, name: str) -> WeightFormat:
    """Return the format of ``int8``, ``int4``, ``fp8``, ``int4-g128`` … or ``none``; int4 alone is ``int4-g16``.

    Raises:
        ConfigError: names the setting ``name``, the value and what is allowed.
    """
    if text in ("none", "fp8"):
        return PLAIN if text == "none" else WeightFormat("fp8")
    match = re.fullmatch(r"(int8|int4)(?:-g([0-9]+))?", text)
    if match is not None:
        kind: Kind = "int8" if match.group(1) == "int8" else "int4"
        group = int(match.group(2)) if match.group(2) else None if kind == "int8" else TWO_LEVEL_GROUP
        format = WeightFormat(kind, group)
        if group is None or group in GROUPS[kind] or format.two_level:
            return format
    allowed = [f"int8-g{size}" for size in sorted(GROUPS["int8"])]
    allowed += [f"int4-g{size}" for size in sorted((*GROUPS["int4"], TWO_LEVEL_GROUP))]
    raise ConfigError(f"{name} = {text!r} must be one of none, int8, int4, fp8, {', '.join(allowed)}")


def _fit(spec: ModelSpec, formats: dict[str, WeightFormat]) -> WeightPlan:
    """Replace groups that do not divide the inputs of a matrix by int8 with one scale per row."""
    shapes = weight_shapes(spec)
    lacking: dict[tuple[str, int, int], int] = {}
    for name, wanted in formats.items():
        in_features = shapes[name][-1]
        if wanted.group is not None and in_features % wanted.group:
            formats[name] = WeightFormat("int8")
            key = re.sub(r"^layers\.\d+\.|\.weight$", "", name), in_features, wanted.group
            lacking[key] = lacking.get(key, 0) + 1
    remarks = [
        f"{count} × {part} as int8 with a scale a row: {in_features} inputs are no multiple of a group of {group}"
        for (part, in_features, group), count in lacking.items()
    ]
    return WeightPlan(formats, tuple(remarks))


def kinds_of(formats: Formats) -> str:
    """Return the names of the formats that occur."""
    return "; ".join(sorted({str(form) for form in formats.values()}))


RANK_ALIGN = 16  # ranks that lie together in the native layout
_ADAPTABLE = re.compile(
    r"layers\.\d+\.(attn\.(q|k|v|gate|o|q_a|q_b|kv_a)|delta\.(q|k|v|z|b|a|o)|kda\.(q|k|v|f|z|f_a|f_b|z_a|z_b|b|o)|mamba\.(z|x|b|c|dt|o)|conv\.(b|c|x|o)|(mlp|moe\.shared)\.(gate|up|down))\.weight"
)


def adaptable(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return "layers.0.attn.q" … → (out_features, in_features)."""
    linears = [(name, shape) for name, shape in weight_shapes(spec).items() if _ADAPTABLE.fullmatch(name)]
    return {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in linears}


END_MODULES = ("embed_tokens", "lm_head")


def end_matrices(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return (out_features, in_features) of the two ends: "embed_tokens", from ids to rows, and "lm_head"."""
    sizes = spec.hidden_size, spec.vocab_size
    return dict(zip(END_MODULES, (sizes, sizes[::-1]), strict=True))


def whole_ends(names: Sequence[str], adapters: Sequence[Adapter]) -> tuple[str, ...]:
    """Return the ends that slots have room for whole: those that the settings name, and what ``adapters`` bring.

    Raises:
        ConfigError: a name is that of no end.
    """
    for name in names:
        if name not in END_MODULES:
            raise ConfigError(f"lora_modules_to_save = {name!r} must be {' or '.join(END_MODULES)}")
    return tuple(sorted({*names, *(name for adapter in adapters for name in adapter.saved)}))


def adapter_bytes(spec: ModelSpec, max_rank: int, dtype: str, saved: Sequence[str] = ()) -> int:
    """Return the bytes of one slot: an A and a B of ``max_rank`` for every matrix, and what DoRA scales by.

    ``saved``: the ends that an adapter may bring whole, "embed_tokens" and "lm_head".
    """
    ranks, ends = -(-max_rank // RANK_ALIGN) * RANK_ALIGN, end_matrices(spec)
    matrices = (*adaptable(spec).values(), *ends.values())
    low = sum(out + into for out, into in matrices) * ranks + sum(prod(ends[name]) for name in saved)
    return low * DTYPE_BYTES[dtype] + sum(out for out, _ in matrices) * 2 * DTYPE_BYTES["float32"]

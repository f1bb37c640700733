"""`Scheme`: how one matrix is to be stored, and which matrices of a model get which. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from quire.errors import ConfigError
from quire.families.quantization_scheme import BLOCK
from quire.weight_format import GROUPS
from quire_lab.quantize.args import QuantizeArgs
from quire_lab.quantize.source import Matrix

# The bits per integer that each format can hold.
BITS: Mapping[str, tuple[int, ...]] = {"compressed-tensors": (2, 3, 4, 8), "gptq": (4, 8), "awq": (4,)}


@dataclass(frozen=True, slots=True)
class Scheme:
    """Integers of ``bits`` with a scale, and maybe a zero point, per ``group`` inputs; None: per output feature.

    ``activations``: they multiply rows that are rounded to 8 bits, with a scale per row. ``floats``: 8 bits are e4m3.
    ``block``: the type of GGUF that they are stored in, or nf4. Its offsets are no whole zero points, and count from 0.
    """

    bits: int
    group: int | None
    symmetric: bool = True
    activations: bool = False
    floats: bool = False
    block: str | None = None

    @property
    def lowest(self) -> int:
        from_zero = self.block is not None and (not self.symmetric or self.block.startswith(("iq4", "nf4")))
        return 0 if from_zero else -(1 << self.bits - 1)

    @property
    def highest(self) -> int:
        return self.lowest + (1 << self.bits) - 1

    def num_groups(self, in_features: int) -> int:
        return 1 if self.group is None else in_features // self.group

    def __str__(self) -> str:
        if self.block is not None:
            return self.block.upper()
        group = "a scale per row" if self.group is None else f"groups of {self.group}"
        if self.floats and self.group is not None:
            group = f"blocks of {self.group} x {self.group}"
        rest = ("" if self.symmetric else ", zero points") + (", rows too" if self.activations else "")
        return f"{'fp' if self.floats else 'int'}{self.bits}, {group}{rest}"


# 16 levels of a table, a scale for 64 inputs.
NF4 = Scheme(4, 64, block="nf4")


@dataclass(frozen=True, slots=True)
class Plan:
    """``schemes``: for each matrix, None where it stays as it is; ``remarks``: what differs from the request.

    ``tables``: schemes of stored tensors that belong to no layer. ``importance``: of the inputs of matrices, of a
    file.
    """

    schemes: dict[str, Scheme | None]
    remarks: tuple[str, ...]
    tables: Mapping[str, Scheme] = field(default_factory=dict)
    importance: Mapping[str, Sequence[float]] = field(default_factory=dict)


def plan(matrices: Sequence[Matrix], wanted: Scheme, keep: Sequence[str], *, mixes: bool = True) -> Plan:
    """Return the scheme of each of ``matrices``.

    ``keep``: patterns of names that stay in 16 bits, each as ``PATTERN=bf16`` or the pattern alone. A group that does
    not divide the inputs of a matrix is halved until it does; below those of kernels, it gets int8 per row.

    Where the format does not mix schemes (``mixes``), such a matrix stays as it is.

    Raises:
        ConfigError: a pattern is wrong or matches nothing, or the group divides no matrix.
    """
    patterns = kept(matrices, keep)
    if wanted.group is not None and all(m.in_features % wanted.group for m in matrices):
        sizes = ", ".join(map(str, sorted({matrix.in_features for matrix in matrices})))
        raise ConfigError(
            f"group_size = {wanted.group} divides the inputs of no matrix of this model, which are {sizes}"
        )
    schemes: dict[str, Scheme | None] = {}
    for matrix in matrices:
        is_kept = any(pattern.search(matrix.name) for pattern in patterns)
        schemes[matrix.name] = None if is_kept else fitting(wanted, matrix.in_features)
        if not mixes and schemes[matrix.name] != wanted:
            schemes[matrix.name] = None
    return Plan(schemes, tuple(_remarks(matrices, wanted, schemes)))


def kept(matrices: Sequence[Matrix], keep: Sequence[str]) -> list[re.Pattern[str]]:
    """Return the patterns of what stays in 16 bits. Raises `ConfigError` for one that is wrong or matches nothing."""
    patterns = [_pattern(text) for text in keep]
    for text, pattern in zip(keep, patterns, strict=True):
        if not any(pattern.search(matrix.name) for matrix in matrices):
            raise ConfigError(f"keep = {text!r} matches no matrix; the first of them is {matrices[0].name}")
    return patterns


def _pattern(text: str) -> re.Pattern[str]:
    pattern, equals, kind = text.rpartition("=")
    if not equals:
        pattern, kind = text, "bf16"
    if kind not in ("bf16", "16"):
        raise ConfigError(f"keep = {text!r}: what is kept stays as it is; write {pattern}=bf16")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"keep = {text!r} is no regular expression: {error}") from None


def fitting(wanted: Scheme, in_features: int) -> Scheme | None:
    """Return ``wanted`` with the largest half of its group that divides ``in_features``, or int8 per row.

    Blocks of fp8 that do not divide them become rows, and nf4 becomes None.
    """
    group = wanted.group
    if wanted == NF4:
        return wanted if in_features % 64 == 0 else None
    if wanted.floats and group is not None:
        return wanted if in_features % group == 0 else replace(wanted, group=None)
    while group is not None and in_features % group:
        group //= 2
        if group < min(GROUPS["int4"]):
            return Scheme(8, None)
    return replace(wanted, group=group)


def _remarks(matrices: Sequence[Matrix], wanted: Scheme, schemes: dict[str, Scheme | None]) -> list[str]:
    others: dict[tuple[str, int], int] = {}
    for matrix in matrices:
        scheme = schemes[matrix.name]
        if scheme is not None and scheme != wanted:
            key = str(scheme), matrix.in_features
            others[key] = others.get(key, 0) + 1
    return [
        f"{count} matrices of {inputs} inputs, which groups of {wanted.group} do not divide: {text}"
        for (text, inputs), count in others.items()
    ]


def default_group(hidden_size: int) -> int:
    """Return the group of a model where none is asked for: 128 inputs, 64 in a narrow model."""
    large, small, _ = GROUPS["int4"]
    return small if hidden_size < 1024 else large


def _only_nf4(args: QuantizeArgs) -> None:
    for flag, allowed in (
        ("bits", (None, 4)),
        ("group_size", (None, 64)),
        ("symmetric", (None,)),
        ("activations", (False,)),
    ):
        if getattr(args, flag) not in allowed:
            raise ConfigError(
                f"{flag} = {getattr(args, flag)}: nf4 has 4 bits, a scale for 64 inputs, and no more"
            )


def _choice(allowed: Sequence[int]) -> str:
    *others, last = map(str, allowed)
    return f"{', '.join(others)} or {last}" if others else last


def wanted_scheme(args: QuantizeArgs, hidden_size: int) -> Scheme:
    """Return the scheme that the flags ask for. Raises `ConfigError` for one that the format cannot hold."""
    if (args.method == "nf4") != (args.format == "bnb"):
        raise ConfigError(
            f"method = {args.method!r} and format = {args.format!r}: bnb holds nf4, and nothing else does"
        )
    if args.method == "nf4":
        _only_nf4(args)
        return NF4
    both = args.activations or args.method in ("smoothquant", "fp8")
    allowed = BITS[args.format]
    bits = args.bits if args.bits is not None else 8 if both else 4
    awq = args.format == "awq"
    symmetric = not awq if args.symmetric is None else args.symmetric
    group = default_group(hidden_size) if args.group_size is None else args.group_size or None
    floats = args.method == "fp8"
    scales = "a scale per output feature" + (f" or per block of {BLOCK} x {BLOCK}" if floats else "")
    if both:
        group = args.group_size or None
    problems = {
        f"bits = {bits}: {args.format} is written with {_choice(allowed)} bits": bits not in allowed,
        "symmetric: awq has a zero point per group": awq and symmetric,
        f"method = {args.method!r} with activations has 8 bits, {scales} and no zero points": both
        and (bits != 8 or group not in ((None, BLOCK) if floats else (None,)) or not symmetric),
        f"method = {args.method!r} is written as compressed-tensors, and {args.format} has no activations": both
        and args.format != "compressed-tensors",
    }
    for text, wrong in problems.items():
        if wrong:
            raise ConfigError(text)
    return Scheme(bits, group, symmetric, activations=both, floats=floats)

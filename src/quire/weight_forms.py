"""The forms in which a CPU can hold a model's weights: bytes, arithmetic on this machine, and measured KL. Torch-free.

`forms` asks `device_formats` for each value of ``--quantize``, as an engine does, so a form that the engine rejects for
these files is not among them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any

from quire.args import EngineArgs
from quire.config import DeviceInfo
from quire.cost.fidelity import MEASURED, Measured, Way, measured_kl, way_of
from quire.device_formats import device_formats
from quire.errors import ConfigError
from quire.modelspec import ModelSpec, weight_shapes
from quire.parallel.topology import Topology
from quire.weight_format import PLAIN, WeightFormat
from quire.weight_plan import Formats, kinds_of, role_of
from quire.weight_table import weight_table

CHOICES = (None, "none", "int8", "int4")
_FLOAT_DOTS = {
    "amx": "tiles (tdpbf16ps)",
    "avx512": "vdpbf16ps",
    "neon_i8mm": "bfmmla",
    "scalar": "fp32, one by one",
}
_INT8_DOTS = {
    "amx": "tiles (tdpbssd)", "avx512": "vpdpbusd", "avx512_vnni": "vpdpbusd", "avx512_bw": "vpmaddwd",
    "avx2": "vpdpbusd or vpmaddwd", "neon_i8mm": "smmla", "neon": "sdot", "scalar": "integers, one by one",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Form:
    """One way to hold the weights.

    ``flag``: of `quire serve`, empty for the files' own form. ``formats``: of the weights that are not plain, by name.
    ``bytes_per_token``: read to decode one token alone. ``kl``: None where it was not measured, and for fp32 itself.
    """

    flag: str
    formats: tuple[tuple[str, WeightFormat], ...]
    held: str
    num_bytes: int
    bytes_per_token: int
    kl: Measured | None

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        sizes = {name: getattr(self, name) for name in ("flag", "held", "num_bytes", "bytes_per_token")}
        return sizes | {"kl": None if self.kl is None else self.kl._asdict()}


@dataclass(frozen=True, slots=True)
class Product:
    """How the matrices of one format are multiplied on this machine."""

    held: str
    rows: str
    instructions: str
    kl: Measured | None  # None: not measured on this kind of device

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return asdict(self) | {"kl": None if self.kl is None else self.kl._asdict()}


def forms(spec: ModelSpec, stored: Formats, dtype: str, device: DeviceInfo) -> list[Form]:
    """Return the forms that an engine on the CPU ``device`` takes, the files' own first.

    Args:
        stored: the formats that the files have, `Checkpoint.formats`.
        dtype: the engine's type for what is plain.
    """
    by_formats: dict[object, Form] = {}  # "none" and no flag are one form of plain files
    for choice in CHOICES:
        try:
            plan = device_formats(EngineArgs(quantize=choice), spec, stored, dtype, device, Topology())
        except ConfigError:
            continue
        rows = weight_table(spec, dtype, plan.formats)
        formats = tuple(sorted(plan.formats.items(), key=itemgetter(0)))
        form = Form(
            flag="" if choice is None else f"--quantize {choice}",
            formats=formats,
            held=kinds_of(plan.formats) or dtype,
            num_bytes=sum(row.num_bytes for row in rows),
            bytes_per_token=sum(row.bytes_per_token for row in rows),
            kl=_measured(spec, plan.formats, stored, dtype),
        )
        by_formats.setdefault(formats, form)
    return list(by_formats.values())


def _measured(spec: ModelSpec, formats: Formats, stored: Formats, dtype: str) -> Measured | None:
    ways = set(ways_of(spec, formats, stored).values())
    return measured_kl(ways - {"plain"} if dtype == "float32" else ways)


def ways_of(spec: ModelSpec, formats: Formats, stored: Formats) -> dict[WeightFormat, Way]:
    """Return how each format of the linears and the output matrix is multiplied on a CPU."""
    ways = {}
    for name in weight_shapes(spec):
        if role_of(spec, name) in ("linear", "head"):
            form = formats.get(name, PLAIN)
            ways[form] = way_of(form, is_stored=form == stored.get(name))
    return ways


def products(
    spec: ModelSpec, formats: Formats, stored: Formats, dtype: str, device: DeviceInfo
) -> list[Product]:
    """Return how an engine on ``device`` multiplies each format of the linears and the output matrix."""
    return [
        Product(str(form) if form.quantized else dtype, _rows(form, dtype, device), _instructions(form, dtype, device),
                MEASURED[way] if device.kind == "cpu" and not (way == "plain" and dtype == "float32") else None)
        for form, way in ways_of(spec, formats, stored).items()
    ]  # fmt: skip


def _rows(form: WeightFormat, dtype: str, device: DeviceInfo) -> str:
    """Return the type of the rows that multiply a matrix."""
    if not form.quantized or (device.kind != "cpu" and form.kind != "fp8"):
        return dtype
    kind = "fp8" if form.kind == "fp8" else "int8"
    rows = form.rows
    scales = "a scale per row" if rows.block is None else f"a scale per {rows.block} inputs"
    return f"{kind}, {scales}" + (", rotated" if rows.rotation else "")


def _instructions(form: WeightFormat, dtype: str, device: DeviceInfo) -> str:
    if device.kind != "cpu":
        return "Triton"
    if not device.native:
        return "torch"
    if not form.quantized:
        return "fp32 fmas" if dtype == "float32" else _FLOAT_DOTS.get(device.isa, "fp32 fmas")
    few = "; up to 6 rows vpdpbusd" if device.isa == "amx" and form.group is not None else ""
    return _INT8_DOTS[device.isa] + few

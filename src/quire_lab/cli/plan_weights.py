"""`PlannedWeights`: what a plan holds weights in. Of files that are here it asks what an engine asks."""

from __future__ import annotations

from dataclasses import dataclass

from quire.cost.hardware import HERE, Hardware
from quire.cost.split import PRECISIONS, Stored
from quire.device import detect_device
from quire.errors import ConfigError
from quire.models.precision import precision_of, stored_formats
from quire.modelspec import ModelSpec
from quire.weight_forms import Form, Product, forms, products
from quire.weight_plan import plan_weights
from quire_lab.plan.capacity import Question

FLOATS = ("bf16", "fp16", "fp32")
ROUNDED = ("int8", "int4")  # values of `quire serve --quantize` on every device


@dataclass(frozen=True, slots=True)
class PlannedWeights:
    """``stored``: the formats of files that are served unchanged. ``forms``: all that an engine takes on this CPU."""

    precision: str
    own_precision: str
    stored: Stored | None = None
    forms: tuple[Form, ...] = ()


def weights_of(model: str, quantize: str | None, spec: ModelSpec, hardware: Hardware) -> PlannedWeights:
    """Return what ``model`` is held in on ``hardware``. ``quantize``: the flag of `quire plan`.

    Raises:
        ConfigError: no engine on that device takes the flag for these files.
    """
    plain = "fp32" if spec.dtype == "float32" else "bf16"
    files, own = stored_formats(model), precision_of(model, spec)
    is_cpu = hardware.kind == "cpu"
    if is_cpu and own == "fp8":
        own = plain  # expanded
    precision = own if quantize is None else plain if quantize == "none" else quantize
    if precision not in PRECISIONS:
        raise ConfigError(f"--quantize {precision!r} must be one of none, {', '.join(PRECISIONS)}")
    if is_cpu and quantize == "fp8":
        raise ConfigError(
            "--quantize fp8 needs a GPU of compute capability 8.9 or more: int8 takes the same bytes"
        )
    if files is None:
        return PlannedWeights(precision, own)
    formats = {
        name: form if is_cpu else form.wide
        for name, form in files.items()
        if form.kind != "fp8" or not is_cpu
    }
    if precision in ROUNDED and precision != own:
        plan_weights(spec, formats, precision, None)
    stored = tuple(formats.items()) if formats and precision == own else None
    possible = forms(spec, files, _dtype(spec), detect_device("cpu")) if is_cpu else []
    return PlannedWeights(precision, own, stored, tuple(possible))


def planned_products(q: Question) -> list[Product]:
    """Return how this machine multiplies the planned weights; empty for another, and without files here."""
    files = stored_formats(q.model) if q.hardware.name == HERE and q.forms else None
    if files is None:
        return []
    device = detect_device("cpu")
    planned = next((form for form in q.forms if form.flag == form_flag(q)), q.forms[0])
    return products(q.spec, dict(planned.formats), files, _dtype(q.spec), device)


def form_flag(q: Question) -> str:
    """Return the `Form.flag` of the form that ``q`` plans."""
    value, _ = quantize_flag(q)
    return "" if value is None else f"--quantize {value}"


def quantize_flag(q: Question) -> tuple[str | None, str | None]:
    """Return the value of ``--quantize`` that serves the plan, and a remark where this version has no such value."""
    if q.precision == q.own_precision or (q.precision in FLOATS and q.own_precision in FLOATS):
        return None, None
    if q.precision in FLOATS:
        return "none", None
    if q.precision not in (*ROUNDED, "fp8"):
        return None, f"this version rounds no weights to {q.precision}: they must be stored so"
    if q.own_precision not in FLOATS:
        return (
            None,
            f"--quantize {q.precision} rounds plain weights, and the published ones are {q.own_precision}",
        )
    return q.precision, None


def _dtype(spec: ModelSpec) -> str:
    return "float32" if spec.dtype == "float32" else "bfloat16"

"""Tables of `quire doctor MODEL` and `quire plan`: how weights are held, how they are multiplied, and other forms."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from quire.config import ModelConfig
from quire.cost.fidelity import MODELS
from quire.units import MIB
from quire.weight_forms import Form, Product
from quire.weight_table import activations_of, weight_table

MEASURE = (
    f"KL is a class: the mean KL of this arithmetic from the same weights in fp32, of {MODELS} "
    "(benchmarks/results/fidelity.md). Of this model: quire eval MODEL --text FILE --against fp32"
)


def held_table(model: ModelConfig) -> Table:
    """Return the format, bits and bytes of weights, activations and KV cache, and the bytes that one token reads."""
    spec = model.spec
    table = Table("part", "held as", "bits", "MiB", "MiB read per token", box=None, pad_edge=False)
    rows = weight_table(spec, model.dtype, model.formats)
    for row in rows:
        size, read = f"{row.num_bytes / MIB:.1f}", f"{row.bytes_per_token / MIB:.2f}"
        table.add_row(row.part, row.held, f"{row.bits:.2f}", size, read)
    total, read_all = sum(row.num_bytes for row in rows), sum(row.bytes_per_token for row in rows)
    table.add_row("all weights", "", "", f"{total / MIB:.1f}", f"{read_all / MIB:.2f}")
    table.add_row("activations of linears", activations_of(model.dtype, model.formats), "", "", "")
    groups = spec.kv_layout(model.max_model_len).groups
    kv = sum(group.bytes_per_token(model.kv_dtype) for group in groups)
    table.add_row("KV cache", model.kv_dtype, "", "", f"{kv / MIB:.4f} for each token before it")
    return table


def product_table(products: Sequence[Product]) -> Table:
    """Return how each format of weights is multiplied on this machine."""
    table = Table(
        "linears held as", "times rows in", "instructions here", "KL, nats", box=None, pad_edge=False
    )
    for one in products:
        kl = "not measured" if one.kl is None else str(one.kl)
        table.add_row(one.held, one.rows, one.instructions, kl)
    return table


def form_table(forms: Sequence[Form], current: str) -> Table:
    """Return the forms that these files can be held in; ``current``: the flag of the one that is planned or run."""
    table = Table("form of the weights", "MiB", "MiB read per token", "KL, nats", box=None, pad_edge=False)
    for form in forms:
        name = form.flag or "as the files are"
        sizes = f"{form.num_bytes / MIB:.1f}", f"{form.bytes_per_token / MIB:.2f}"
        kl = "" if form.kl is None else str(form.kl)
        table.add_row(name, *sizes, kl, style="bold" if form.flag == current else "")
    return table

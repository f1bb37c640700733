"""`quire doctor MODEL`: what a model is held in, and the bytes that takes."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from quire.args import EngineArgs
from quire.config import ModelConfig
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.weight_plan import activations_of, weight_table

MIB = 2**20


def model_report(args: EngineArgs) -> None:
    """Print the table. Raises what `configure` raises."""
    config, _ = configure(args, detect_device(args.device))
    console = Console()
    console.print(table_of(config.model))
    for line in config.model.remarks:
        console.print(f"• {line}")


def table_of(model: ModelConfig) -> Table:
    """Weights, activations and KV cache: what each is held in, its bits, its bytes, and what a token reads of it."""
    spec = model.spec
    table = Table("part", "held as", "bits", "MiB", "MiB read a token", box=None, pad_edge=False)
    rows = weight_table(spec, model.dtype, model.formats)
    for row in rows:
        size, read = f"{row.num_bytes / MIB:.1f}", f"{row.bytes_per_token / MIB:.2f}"
        table.add_row(row.part, row.held, f"{row.bits:.2f}", size, read)
    total, read_all = sum(row.num_bytes for row in rows), sum(row.bytes_per_token for row in rows)
    table.add_row("all weights", "", "", f"{total / MIB:.1f}", f"{read_all / MIB:.2f}")
    table.add_row("activations of linears", activations_of(model.dtype, model.formats), "", "", "")
    groups = spec.kv_layout(model.max_model_len).groups
    kv = sum(spec.kv_bytes_per_token(group, model.kv_dtype) for group in groups)
    table.add_row("KV cache", model.kv_dtype, "", "", f"{kv / MIB:.4f} for each token before it")
    return table

"""`quire doctor MODEL`: the formats in which a model is held and their bytes; ``--check``: is every file of it sound?

Torch-free.
"""

from __future__ import annotations

import asyncio
from datetime import datetime

from rich.console import Console
from rich.table import Table

from quire.args import EngineArgs
from quire.config import ModelConfig
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.engine.prompts import Prompts
from quire.errors import ModelLoadError
from quire.models.checkpoint import Checkpoint, read_tokenizer, stored_sources
from quire.models.gguf_check import scales_not_finite
from quire.models.safetensors_file import AGAIN, not_finite, reading
from quire.text.chat_template import ChatTemplate
from quire.weight_table import activations_of, weight_table

MIB = 2**20


def model_report(args: EngineArgs) -> None:
    """Print the table. Raises the errors of `configure`."""
    config, _ = configure(args, detect_device(args.device))
    console = Console()
    console.print(table_of(config.model))
    for line in config.model.remarks:
        console.print(f"• {line}")


def table_of(model: ModelConfig) -> Table:
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
    kv = sum(spec.kv_bytes_per_token(group, model.kv_dtype) for group in groups)
    table.add_row("KV cache", model.kv_dtype, "", "", f"{kv / MIB:.4f} for each token before it")
    return table


def check_model(model: str) -> int:
    """Check the names, shapes and types of ``model``, then every weight; return the exit status.

    Raises:
        ModelLoadError, UnsupportedModelError: a file, a name, a shape or a type is wrong; the message says which.
    """
    _, checkpoint = configure(EngineArgs(model=model), detect_device())
    tensors, _ = stored_sources(checkpoint.path, checkpoint.spec)
    console = Console(highlight=False, soft_wrap=True)
    bad = [*not_finite(tensors), *scales_not_finite(tensors)]
    for found in bad:
        console.print(
            f"[red]{found.name}[/red] in {found.file} holds {found.num_nan} NaN and {found.num_inf} infinite values, "
            f"the first at {list(found.first)}"
        )
    size = sum(tensor.num_bytes for tensor in tensors.values()) / 2**30
    verdict = (
        f"{len(bad)} are not finite: download them again, or ask the publisher." if bad else "all are finite."
    )
    console.print(
        f"{len(tensors)} tensors, {size:.2f} GiB: names, shapes and types fit the configuration; {verdict}"
    )
    console.print(_text_side(checkpoint))
    return 1 if bad else 0


def _text_side(checkpoint: Checkpoint) -> str:
    """Read the tokenizer, compile the chat template, and return what they are.

    Raises:
        ModelLoadError: one of them cannot be read or compiled, or the tokenizer has ids that the model has not.
    """
    tokenizer, most = read_tokenizer(checkpoint.tokenizer), checkpoint.spec.vocab_size
    if tokenizer.vocab_size > most:
        raise ModelLoadError(
            f"{checkpoint.tokenizer}: ids up to {tokenizer.vocab_size - 1}, and the model has {most} tokens; {AGAIN}."
        )
    with reading(checkpoint.tokenizer):
        template = ChatTemplate.of(tokenizer, datetime.now)
    if not template.names:
        return f"tokenizer: {tokenizer.vocab_size} ids; no chat template"
    prompts = Prompts(tokenizer, template)
    try:
        asyncio.run(prompts.start())
    finally:
        prompts.close()
    return f"tokenizer: {tokenizer.vocab_size} ids; chat template {', '.join(template.names)}: compiles"

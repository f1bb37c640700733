"""`quire doctor MODEL`: how a model is held and multiplied, and its other forms; ``--check``: are its files sound?

Torch-free.
"""

from __future__ import annotations

import asyncio
from datetime import datetime

from rich.console import Console

from quire.args import EngineArgs
from quire.cli.weight_tables import MEASURE, form_table, held_table, product_table
from quire.device import detect_device
from quire.engine.assemble import configure
from quire.engine.prompts import Prompts
from quire.errors import ModelLoadError
from quire.models.checkpoint import Checkpoint, read_tokenizer, stored_sources
from quire.models.gguf_check import scales_not_finite
from quire.models.safetensors_file import AGAIN, not_finite, reading
from quire.text.chat_template import ChatTemplate
from quire.weight_forms import forms, products


def model_report(args: EngineArgs) -> None:
    """Print how the weights are held and multiplied, and the other forms. Raises the errors of `configure`."""
    device = detect_device(args.device)
    config, checkpoint = configure(args, device)
    model, console = config.model, Console()
    stored = checkpoint.formats
    console.print(held_table(model))
    console.print()
    console.print(product_table(products(model.spec, model.formats, stored, model.dtype, device)))
    if device.kind == "cpu":
        current = "" if args.quantize is None else f"--quantize {args.quantize}"
        console.print()
        console.print(form_table(forms(model.spec, stored, model.dtype, device), current))
        console.print(f"\n• {MEASURE}", highlight=False)
    for line in model.remarks:
        console.print(f"• {line}")


def check_model(model: str) -> int:
    """Check the names, shapes and types of ``model``, then every weight; return the exit status.

    Raises:
        ModelLoadError, UnsupportedModelError: a file, a name, a shape or a type is wrong; the message says which.
    """
    _, checkpoint = configure(EngineArgs(model=model), detect_device())
    tensors, _ = stored_sources(checkpoint.path, checkpoint.spec)
    console = Console(highlight=False, soft_wrap=True)
    bad = [*not_finite(tensors), *scales_not_finite(tensors)]
    for row in bad:
        console.print(
            f"[red]{row.name}[/red] in {row.file} holds {row.num_nan} NaN and {row.num_inf} infinite values, "
            f"the first at {list(row.first)}"
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

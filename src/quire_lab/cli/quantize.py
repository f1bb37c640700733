"""`quire quantize`."""

from __future__ import annotations

from typing import Any

import typer

from quire.cli.command import SettingsCommand
from quire.cli.flags import ModelArgument, command_with, pick
from quire_lab.quantize.args import QuantizeArgs

quantize_app = typer.Typer(add_completion=False)


@quantize_app.command("quantize", cls=SettingsCommand)
@command_with(QuantizeArgs)
def quantize(model: ModelArgument = None, *, settings: dict[str, Any]) -> None:
    """Write a smaller checkpoint, and say what it loses."""
    from quire_lab.quantize.run import run

    raise typer.Exit(run(model or "quill", pick(QuantizeArgs, settings)))

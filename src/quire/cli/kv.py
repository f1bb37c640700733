"""`quire kv ls | clear`: what the folder of a disk tier (`--kv-disk`) holds, and its removal."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from quire.cli.keys import aligned
from quire.tiers.contents import clear, contents

kv_app = typer.Typer(help="The KV cache on disk: list, clear.", no_args_is_help=True, add_completion=False)
Folder = Annotated[Path, typer.Argument(help="The folder of --kv-disk.", show_default=False)]


@kv_app.command("ls")
def list_roots(folder: Folder) -> None:
    """Print what it holds: a root for each model, with all that its KV depends on."""
    roots, wear_bytes = contents(folder)
    rows = [
        (
            root.root,
            root.num_segments,
            root.num_written_now,
            root.num_blocks,
            _mib(root.block_bytes),
            _mib(root.size_bytes),
            f"{datetime.fromtimestamp(root.last_hit_s, UTC):%Y-%m-%d %H:%M}"
            if root.num_segments
            else "never",
        )
        for root in sorted(roots, key=lambda root: -root.last_hit_s)
    ]
    typer.echo(
        aligned(("root", "segments", "writing", "blocks", "MiB of KV", "MiB on disk", "last hit"), rows)
    )
    total = sum(root.size_bytes for root in roots)
    typer.echo(f"{_mib(total):,} MiB in all; {_mib(wear_bytes):,} MiB were written here so far")


@kv_app.command("clear")
def clear_folder(
    folder: Folder,
    root: Annotated[
        str | None, typer.Option("--root", help="Only this root [all].", show_default=False)
    ] = None,
) -> None:
    """Remove it. Servers that use the folder go on, and compute again what they find gone."""
    count, size = clear(folder, root)
    typer.echo(f"{folder}: removed {count:,} segments, {_mib(size):,} MiB")


def _mib(num_bytes: int) -> int:
    return round(num_bytes / 2**20)

"""`quire keys create | list | rotate | revoke`: the file that `--api-key-file` and the gateway read."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.http import keys as key_file

keys_app = typer.Typer(
    help="API keys in a file: create, list, rotate, revoke.", no_args_is_help=True, add_completion=False
)
FileOption = Annotated[Path, typer.Option("--file", help="The file of keys.")]
DEFAULT = Path("quire-keys.txt")
Name = Annotated[str, typer.Argument(help="The name of the key.")]


@keys_app.command()
def create(
    name: Name,
    file: FileOption = DEFAULT,
    tenant: Annotated[
        str | None,
        typer.Option(
            "--tenant", help="The tenant that it belongs to; limits and files are a tenant's [the name]."
        ),
    ] = None,
    models: Annotated[
        list[str] | None, typer.Option("--model", help="A model that it may use, such as llama-* [all].")
    ] = None,
    endpoints: Annotated[
        list[str] | None,
        typer.Option("--endpoint", help="A path that it may call, such as /v1/chat/* [all]."),
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", help="A date or time (UTC) at which it ends [never].")
    ] = None,
    weight: Annotated[str, typer.Option("--weight", help="Share of the engine under --order fair.")] = "1",
    cache_group: Annotated[
        str | None,
        typer.Option(
            "--cache-group", help="Its tenant shares cached prefixes with all of this group [none]."
        ),
    ] = None,
    admin: Annotated[bool, typer.Option("--admin", help="It may also use the admin surface.")] = False,
) -> None:
    """Add a key and print it: it is shown this once, the file holds its hash."""
    key = key_file.ApiKey(
        name=key_file.check_name(name, "name"),
        tenant=key_file.check_name(tenant or name, "--tenant"),
        digest="",
        created=datetime.now(UTC),
        expires=key_file.read_time(expires, "--expires") if expires else None,
        models=tuple(models or ()),
        endpoints=tuple(endpoints or ()),
        admin=admin,
        weight=key_file.check_weight(weight, "--weight"),
        cache_group=key_file.check_name(cache_group, "--cache-group") if cache_group else "",
    )
    typer.echo(key_file.create_key(file, key))


@keys_app.command("list")
def list_keys(file: FileOption = DEFAULT) -> None:
    """Print the names, tenants and rights of all keys."""
    now = datetime.now(UTC)
    rows = []
    for key in key_file.read_keys(file).keys.values():
        ends = (
            "never"
            if key.expires is None
            else f"{key.expires:%Y-%m-%d %H:%M}" + " (expired)" * key.is_expired(now)
        )
        rights = (", ".join(key.models) or "all", ", ".join(key.endpoints) or "all", "admin" * key.admin)
        rows.append((key.name, key.tenant, f"{key.created:%Y-%m-%d}", ends, *rights))
    typer.echo(aligned(("name", "tenant", "created", "expires", "models", "endpoints", "scope"), rows))


@keys_app.command()
def rotate(name: Name, file: FileOption = DEFAULT) -> None:
    """Replace a key by a new one, which is printed; the old one ends at once."""
    typer.echo(key_file.rotate_key(file, name))


@keys_app.command()
def revoke(name: Name, file: FileOption = DEFAULT) -> None:
    """Remove a key."""
    key_file.revoke_key(file, name)
    typer.echo(f"{name}: revoked")


def aligned(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as text of any width, numbers to the right."""
    texts = [head, *([f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    right = [isinstance(cell, int | float) for cell in rows[0]] if rows else [False] * len(head)
    return "\n".join(
        "  ".join(
            text.rjust(width) if numeric else text.ljust(width)
            for text, width, numeric in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in texts
    )

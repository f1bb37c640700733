"""`quire ledger report | forget`: what was used, by tenant, model, day …, from the gateway's ledger."""

from __future__ import annotations

import csv
import json
import sys
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from quire.cli.keys import aligned
from quire.errors import ConfigError
from quire.http.keys import read_time
from quire_gateway.ledger_database import open_database
from quire_gateway.ledger_report import GROUPS, forget, report
from quire_gateway.quotas import NANO

ledger_app = typer.Typer(
    help="The gateway's ledger: report, forget.", no_args_is_help=True, add_completion=False
)
Url = Annotated[str, typer.Option("--ledger", help="A path, sqlite:///PATH or postgresql://…")]
DEFAULT = "quire-ledger.sqlite"
FORMATS = ("table", "csv", "json")


@ledger_app.command("report")
def report_command(
    ledger: Url = DEFAULT,
    by: Annotated[str, typer.Option("--by", help=f"Groups: {', '.join(GROUPS)}.")] = "tenant,model,day",
    since: Annotated[str | None, typer.Option("--since", help="From this date or time (UTC) on.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="Before this date or time (UTC).")] = None,
    form: Annotated[str, typer.Option("--format", help=f"{', '.join(FORMATS)}.")] = "table",
) -> None:
    """Print requests, tokens and price per group."""
    if form not in FORMATS:
        raise ConfigError(f"--format {form!r} must be one of {', '.join(FORMATS)}.")
    database = open_database(ledger)
    try:
        lines = report(
            database,
            [group for group in by.replace(" ", "").split(",") if group],
            read_time(since, "--since") if since else None,
            read_time(until, "--until") if until else None,
        )
    except OSError as error:
        raise ConfigError(f"The ledger does not answer: {error}.") from None
    finally:
        database.close()
    for line in lines:
        line["price"] = f"{line.pop('price_nano') / NANO:.6f}"
    _print(lines, form)


def _print(lines: list[dict[str, Any]], form: str) -> None:
    if form == "json":
        typer.echo(json.dumps(lines, indent=2))
        return
    columns = list(lines[0]) if lines else []
    if form == "csv":
        writer = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return
    typer.echo(aligned(columns, [list(line.values()) for line in lines]))


@ledger_app.command("forget")
def forget_command(
    days: Annotated[int, typer.Option("--older-than", help="Days that rows are kept.", min=0)],
    ledger: Url = DEFAULT,
) -> None:
    """Delete the rows of requests that finished longer ago than that."""
    database = open_database(ledger)
    try:
        count = forget(database, datetime.now(UTC) - timedelta(days=days))
    finally:
        database.close()
    typer.echo(f"{count:,} rows deleted")

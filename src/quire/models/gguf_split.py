"""GGUF files by their names: the parts of a split file, NAME-00001-of-0000N.gguf, and the one of a quantization."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from quire.errors import ModelLoadError

_PART = re.compile(r"(?P<name>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def part_names(name: str) -> tuple[str, ...]:
    """Return the names of all parts of the file that ``name`` is a part of, or ``name`` alone."""
    match = _PART.fullmatch(name)
    if match is None:
        return (name,)
    count = int(match["count"])
    return tuple(f"{match['name']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1))


def part_paths(path: Path) -> tuple[Path, ...]:
    """Return the paths of all parts of the file that ``path`` is a part of, whether they exist or not."""
    return tuple(path.with_name(name) for name in part_names(path.name))


def stem(name: str) -> str:
    """Return ``name`` without its number of a part and its ending."""
    match = _PART.fullmatch(name)
    return Path(name).stem if match is None else match["name"]


def models_among(names: Iterable[str]) -> list[str]:
    """Return the GGUF files among ``names`` that are models, in order: of a split file the name of its first part.

    Projectors for images (mmproj) are no models.
    """
    files = (name for name in names if name.endswith(".gguf"))
    return list(
        dict.fromkeys(part_names(name)[0] for name in files if "mmproj" not in Path(name).name.lower())
    )


def pick_gguf(name: str, quant: str, files: Sequence[str]) -> str:
    """Return the one GGUF file whose name has ``quant`` in it, of a split file the first part.

    Raises `ModelLoadError` naming what there is.
    """
    ggufs = models_among(files)
    hits = [file for file in ggufs if quant.lower() in Path(file).name.lower()]
    if len(hits) == 1:
        return hits[0]
    exact = [file for file in hits if stem(file).lower().endswith(("-" + quant.lower(), "." + quant.lower()))]
    if len(exact) == 1:
        return exact[0]
    there = ", ".join(Path(file).name for file in (hits or ggufs)) or "none"
    which = "no GGUF file" if not hits else f"{len(hits)} GGUF files"
    raise ModelLoadError(f"{name}: {which} with {quant!r} in the name. GGUF files there: {there}.")

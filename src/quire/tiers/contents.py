"""What a disk tier's folder holds, root by root, and its removal: for people, whether servers use the folder or not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from quire.errors import ConfigError
from quire.tiers.folder import TierFolder, remove_if_empty
from quire.tiers.record import short_root
from quire.tiers.segment import SegmentFile


@dataclass(slots=True)
class RootContents:
    """The segments of one root. ``last_hit_s``: Unix time."""

    root: str
    num_segments: int = 0
    num_written_now: int = 0
    num_blocks: int = 0
    block_bytes: int = 0
    size_bytes: int = 0
    last_hit_s: float = 0.0


def contents(folder: Path) -> tuple[list[RootContents], int]:
    """Return what each root has, and the bytes ever written to the folder.

    Raises:
        ConfigError: it is no folder, or may not be read.
    """
    with _readable(folder) as tier:
        return [_root_contents(tier, root) for root in tier.roots()], tier.wear_bytes()


def clear(folder: Path, root: str | None = None) -> tuple[int, int]:
    """Remove all segments of one root or of all; return their number and bytes. Other files stay.

    A server that uses them finds them gone within a second, and begins new ones.

    Raises:
        ConfigError: there is no such folder or root, or it may not be written.
    """
    count = size = 0
    with _readable(folder) as tier:
        if root is not None and not tier.root(root).is_dir():
            names = ", ".join(path.name for path in tier.roots()) or "none"
            raise ConfigError(f"The KV folder {folder} has no root {root!r}; it has {names}.")
        for path in [tier.root(root)] if root is not None else tier.roots():
            for info in tier.segments(path):
                info.path.unlink(missing_ok=True)
                count, size = count + 1, size + info.size
            remove_if_empty(path)
    return count, size


def _root_contents(tier: TierFolder, path: Path) -> RootContents:
    found = RootContents(path.name)
    for info in tier.segments(path):
        found.num_segments += 1
        found.size_bytes += info.size
        found.last_hit_s = max(found.last_hit_s, info.last_hit_ns / 1e9)
        with suppress(FileNotFoundError):
            file = SegmentFile.open(info.path, short_root(path.name))
            found.num_written_now += file.is_being_written()
            entries = file.new_entries()
            found.num_blocks += len(entries)
            found.block_bytes += sum(entry.num_bytes for entry in entries)
    return found


@contextmanager
def _readable(folder: Path) -> Iterator[TierFolder]:
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}: give the one of --kv-disk.")
    try:
        yield TierFolder(folder, 0, allows_network=True)
    except OSError as error:
        raise ConfigError(f"The KV folder {folder} cannot be used: {error.strerror or error}.") from None

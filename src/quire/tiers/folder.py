"""The folder of a disk tier: segments of several roots and several processes under one bound.

    DIR/ROOT/WRITER-N.seg    one root per model, with all that its KV depends on; mode 700, files 600
    DIR/written              bytes ever written to it, as text

The bound holds for DIR as a whole: before a process begins a segment, it removes the segments that were hit longest ago
until the new one fits, under a lock of DIR. A segment that is being written counts with all that it has reserved, and
is not removed. The time of the last hit is the file's modification time, so processes and restarts share it.
"""

from __future__ import annotations

import fcntl
import os
import re
import threading
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from quire.errors import ConfigError
from quire.private import private_folder, written_anew
from quire.tiers.segment import SUFFIX, SegmentFile

_ROOT_NAME = re.compile(r"[0-9a-f]{8,128}")
_SEGMENT_NAME = re.compile(rf"[0-9a-f]+-[0-9]+{re.escape(SUFFIX)}")
# Longest wait for the folder's lock.
LOCK_WAIT_S = 0.1
# Locks and atomic appends are not to be relied on there, and a read may hang for minutes.
_NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "davfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "smb3",
    "smbfs",
}  # fmt: skip
_MOUNTS = Path("/proc/self/mounts")


class SegmentInfo(NamedTuple):
    """A segment as the folder lists it."""

    path: Path
    size: int
    last_hit_ns: int


class TierFolder:
    """A folder with a bound. ``path`` is made if it is not there; nothing else makes it again once it is gone."""

    def __init__(self, path: Path, size_bytes: int, *, allows_network: bool = False) -> None:
        """Raises `ConfigError`: the folder cannot be used."""
        self.path = path
        self.size_bytes = size_bytes
        if path.exists() and not path.is_dir():
            raise ConfigError(f"The KV tier's folder {path} is a file: give a folder.")
        kind = file_system_of(path)
        if not allows_network and (kind in _NETWORK or kind.startswith("fuse.")):
            raise ConfigError(
                f"The KV tier's folder {path} is on a network file system ({kind}), where locks are not to be relied "
                "on: give a folder on a local disk."
            )
        try:
            private_folder(path, is_ours=False)
        except OSError as error:
            raise ConfigError(f"The KV tier's folder {path} cannot be made: {error.strerror}.") from None

    def root(self, name: str) -> Path:
        """Return the folder of a root. Raises `ConfigError` for a name that is none."""
        if not _ROOT_NAME.fullmatch(name):
            raise ConfigError(f"A root of the KV tier is 8 to 128 hexadecimal digits, not {name!r}.")
        return self.path / name

    def roots(self) -> list[Path]:
        """Return the folders of all roots. Raises `OSError`."""
        return sorted(
            path for path in self.path.iterdir() if _ROOT_NAME.fullmatch(path.name) and path.is_dir()
        )

    def segments(self, root: Path) -> list[SegmentInfo]:
        """Return the segments of a root, the least recently hit first. Raises `OSError`."""
        found = []
        with os.scandir(root) as entries:
            for each in entries:
                if _SEGMENT_NAME.fullmatch(each.name) and each.is_file(follow_symlinks=False):
                    with _may_be_gone():
                        stat = each.stat(follow_symlinks=False)
                        found.append(SegmentInfo(Path(each.path), stat.st_size, stat.st_mtime_ns))
        return sorted(found, key=lambda info: (info.last_hit_ns, info.path))

    def all_segments(self) -> list[SegmentInfo]:
        """Return the segments of all roots, the least recently hit first. Raises `OSError`."""
        found: list[SegmentInfo] = []
        for root in self.roots():
            with _may_be_gone():
                found += self.segments(root)
        return sorted(found, key=lambda info: (info.last_hit_ns, info.path))

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the folder's lock; False where another process has kept it for a tenth of a second."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield _lock(fd)
        finally:
            os.close(fd)

    def make_room(
        self, num_bytes: int, spared: Container[Path] = (), *, evicts_one: bool = False
    ) -> list[Path] | None:
        """Remove segments until ``num_bytes`` more fit below the bound; return them. Raises `OSError`.

        ``spared``: segments that stay. ``evicts_one``: remove at least one, as the disk is full though the bound is not
        reached. Returns None, and removes nothing, where there is no way to make room. Call it locked.
        """
        segments = self.all_segments()
        surplus = sum(info.size for info in segments) + num_bytes - self.size_bytes
        chosen: list[Path] = []
        for info in segments:
            if surplus <= 0 and len(chosen) >= evicts_one:
                break
            if info.path not in spared and not _is_being_written(info.path):
                chosen.append(info.path)
                surplus -= info.size
        if surplus > 0 or len(chosen) < evicts_one:
            return None
        for path in chosen:
            path.unlink(missing_ok=True)
            remove_if_empty(path.parent)
        return chosen

    def add_wear(self, num_bytes: int) -> None:
        """Add to the bytes ever written here. Call it locked. Raises `OSError`."""
        total = self.wear_bytes() + num_bytes
        made = self.path / "written.tmp"
        with written_anew(made) as file:
            file.write(str(total).encode())
        made.replace(self.path / "written")

    def wear_bytes(self) -> int:
        """Return the bytes ever written here, to within the segments that are not sealed."""
        try:
            return int((self.path / "written").read_text()[:20])
        except (OSError, ValueError):
            return 0


def file_system_of(path: Path) -> str:
    """Return the type of the file system that has ``path``, or would have it; empty where that is not known."""
    target = os.path.realpath(path)
    best = ("", "")
    try:
        mounts = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for fields in map(str.split, mounts):
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if target == point or target.startswith(point.rstrip("/") + "/"):
            best = max(best, (point, fields[2]), key=lambda each: len(each[0]))
    return best[1]


def _lock(fd: int) -> bool:
    pause = threading.Event()  # never set
    for _ in range(20):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pause.wait(LOCK_WAIT_S / 20)
        else:
            return True
    return False


def _is_being_written(path: Path) -> bool:
    try:
        return SegmentFile.open(path, b"").is_being_written()
    except FileNotFoundError:
        return False


def remove_if_empty(root: Path) -> None:
    with _may_be_gone():
        if not any(root.iterdir()):
            root.rmdir()


@contextmanager
def _may_be_gone() -> Iterator[None]:
    """Go on where another process has removed the file or folder."""
    try:
        yield
    except FileNotFoundError:
        return

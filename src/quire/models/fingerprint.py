"""`fingerprint`: a digest that tells whether two machines have the same weights, without reading all of them.

`identity` tells it of two moments on one machine, and `code_digest` whether it was the same code that read them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import quire
from quire.models.checkpoint import Checkpoint
from quire.models.safetensors_file import INDEX_NAME, checkpoint_files

_HEAD_BYTES = 2**16  # per file: names, types and shapes of its first tensors
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096  # per file, spread evenly


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return 24 hexadecimal digits of the model's shape and of samples of its weight files; their paths do not matter.

    A few milliseconds: a change of few weights between two samples is not seen.

    Raises:
        OSError: a file cannot be read.
    """
    digest = hashlib.blake2b(repr(checkpoint.spec).encode(), digest_size=12)
    digest.update(json.dumps([checkpoint.kind, len(checkpoint.files)]).encode())
    for path in sorted(checkpoint.files, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEAD_BYTES))
            for index in range(_NUM_SAMPLES):
                file.seek(size * index // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def identity(path: Path) -> str:
    """Return 24 hexadecimal digits of what the file system says of the checkpoint, a folder or a GGUF file.

    Of each file its name, inode, size, times of change and first bytes (the header). The time of the last change of a
    file (ctime) cannot be set by a program, so that a change in place is seen as long as the file system keeps it.

    Raises:
        OSError, ModelLoadError: a file is missing or cannot be read.
    """
    digest = hashlib.blake2b(digest_size=12)
    files = [path]
    if path.suffix == ".gguf" and path.is_file():
        from quire.models.gguf_split import part_paths

        files = list(part_paths(path))
    elif path.is_dir():
        described = (path / name for name in ("config.json", INDEX_NAME))
        files = [*checkpoint_files(path), *(file for file in described if file.exists())]
    for file in files:
        stat = file.stat()
        facts = (file.name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        with file.open("rb") as opened:
            digest.update(repr(facts).encode() + opened.read(_HEAD_BYTES))
    return digest.hexdigest()


def code_digest(packages: Sequence[str]) -> str:
    """Return 32 hexadecimal digits of the source of ``packages`` of Quire and of the native extension."""
    digest = hashlib.blake2b(digest_size=16)
    root, native = Path(quire.__file__).parent, find_spec("quire._native")
    files = [path for name in packages for path in sorted((root / name).rglob("*.py"))]
    for path in [*files, *([Path(native.origin)] if native is not None and native.origin else [])]:
        digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()

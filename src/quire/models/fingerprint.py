"""`fingerprint`: a digest that tells whether two machines have the same weights, without reading all of them."""

from __future__ import annotations

import hashlib
import json

from quire.models.checkpoint import Checkpoint

_HEAD_BYTES = 2**16  # of each file: names, types and shapes of its first tensors
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file, spread evenly


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

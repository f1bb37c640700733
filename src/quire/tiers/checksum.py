"""`crc32`: the values of zlib's, by carry-less products where the native extension and the processor have them.

Segments that were written with the one are read with the other.
"""

from __future__ import annotations

import zlib

try:
    from quire import _native as native
except ImportError:
    native = None  # type: ignore[assignment]

IS_NATIVE = native is not None and native.cpu_features().get("pclmul", False)
# (bytes, value of the bytes before) → value
crc32 = native.crc32 if IS_NATIVE else zlib.crc32

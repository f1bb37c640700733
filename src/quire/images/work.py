"""The work of a helper on images: one file at a time → the text and the pieces of the prepared image."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import msgspec

from quire.images.decode import ImageError, decode_image
from quire.images.prepared import PreparedImage
from quire.vision_spec import VisionSpec


def performer(vision: Mapping[str, Any]) -> Callable[[bytes], bytes]:
    """Return what turns the bytes of a file into an answer in msgpack. ``vision``: the fields of a `VisionSpec`."""
    spec = msgspec.convert(vision, VisionSpec)
    prepare = preparer(spec)
    encode = msgspec.msgpack.Encoder().encode

    def perform(data: bytes) -> bytes:
        try:
            return b"=" + encode(prepare(data))
        except ImageError as error:
            return b"!" + str(error).encode()
        except MemoryError:
            return b"!" + b"it takes more memory than is allowed"

    return perform


def preparer(vision: VisionSpec) -> Callable[[bytes], PreparedImage]:
    """Return what prepares the bytes of a file for the encoder of ``vision``; it raises `ImageError`."""
    prepare: Callable[[Any, VisionSpec], PreparedImage]
    prepare = import_module(f"quire.images.{vision.kind}").prepare
    return lambda data: prepare(decode_image(data), vision)


def read_answer(raw: bytes | bytearray) -> PreparedImage:
    """Return what a helper answered. Raises `ImageError` with its reason."""
    if raw[:1] != b"=":
        raise ImageError(bytes(raw[1:]).decode())
    return msgspec.msgpack.decode(memoryview(raw)[1:], type=PreparedImage)

"""An image as a part of a message: OpenAI's ``image_url`` and what other APIs call it.

Nothing that a request names is fetched: an image comes with its request, as a ``data:`` URL or in base64.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from quire.engine.images import ImageFile
from quire.errors import RequestError, clip
from quire.images.limits import LIMITS

KINDS = ("image_url", "input_image", "image")


def with_images_read(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return ``messages`` with the image of each part that has one in place of its URL.

    Raises:
        RequestError: an image that cannot be read; names its path.
    """
    read: list[Mapping[str, Any]] = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = [
                {"type": "image", "image": image_of(part, f"messages[{i}].content[{j}]")}
                if isinstance(part, Mapping) and part.get("type") in KINDS
                else part
                for j, part in enumerate(content)
            ]
            message = {**message, "content": parts}
        read.append(message)
    return read


def image_of(part: Mapping[str, Any], where: str) -> ImageFile:
    """Return the image of a part.

    Raises:
        RequestError: it has no image that came with the request.
    """
    kind = str(part.get("type"))
    value, place = part.get(kind), f"{where}.{kind}"
    if kind == "input_image":
        value, place = part.get("image_url"), f"{where}.image_url"
    elif kind == "image" and "source" in part:
        return _from_source(part["source"], f"{where}.source")
    if isinstance(value, Mapping):
        for key in value:
            if key not in ("url", "detail"):
                raise refused_image(
                    f"{place}.{key}", f"the field {clip(key)} is not known beside url and detail"
                )
        value, place = value.get("url"), f"{place}.url"
    if not isinstance(value, str) or not value:
        raise refused_image(place, "it must be a data: URL, such as data:image/png;base64,…")
    return ImageFile(data_of(value, place), place)


def _from_source(source: Any, where: str) -> ImageFile:
    """Return the image of Anthropic's ``source``."""
    if not isinstance(source, Mapping):
        raise refused_image(where, "it must be an object with a type and data")
    kind = source.get("type")
    if kind == "url":
        where = f"{where}.url"
        return ImageFile(data_of(str(source.get("url")), where), where)
    if kind != "base64":
        raise refused_image(f"{where}.type", f"{clip(kind)} is not supported: it must be 'base64'")
    media_type, data = source.get("media_type"), source.get("data")
    if not isinstance(media_type, str) or not media_type.startswith("image/"):
        raise refused_image(f"{where}.media_type", f"{clip(media_type)} is no image, such as image/png")
    where = f"{where}.data"
    if not isinstance(data, str):
        raise refused_image(where, "it must be a string in base64")
    return ImageFile(decoded_base64(data, where), where)


def data_of(url: str, where: str) -> bytes:
    """Return the bytes of a ``data:`` URL."""
    if url.partition(":")[0].lower() != "data":
        raise refused_image(
            where, "this server fetches nothing: send the image itself, as data:image/png;base64,…"
        )
    head, comma, text = url.partition(",")
    if not comma or not head[len("data:") :].lower().startswith("image/"):
        raise refused_image(where, f"{clip(head)} is no image: it must be data:image/…;base64,…")
    if head.lower().endswith(";base64"):
        return decoded_base64(text, where)
    return _checked(unquote_to_bytes(text), where)


def decoded_base64(text: str, where: str) -> bytes:
    """Return the bytes of an image in base64."""
    if len(text) > LIMITS.max_bytes * 4 // 3 + 4:
        raise _too_large(where, len(text) * 3 // 4)
    try:
        return _checked(base64.b64decode(text, validate=True), where)
    except (binascii.Error, ValueError):
        raise refused_image(where, "it is not valid base64") from None


def _checked(data: bytes, where: str) -> bytes:
    if not data:
        raise refused_image(where, "it is empty")
    if len(data) > LIMITS.max_bytes:
        raise _too_large(where, len(data))
    return data


def _too_large(where: str, num_bytes: int) -> RequestError:
    return refused_image(
        where, f"it has {num_bytes} bytes, and at most {LIMITS.max_bytes} are allowed: send a smaller one"
    )


def too_many_images(where: str) -> RequestError:
    most = LIMITS.max_images
    return refused_image(
        where, f"a request may hold {most} images at most: leave out those that do not matter"
    )


def refused_image(where: str, reason: str) -> RequestError:
    return RequestError(f"{where}: this image cannot be used: {reason}.", param=where, code="invalid_image")

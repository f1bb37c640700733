"""Images in the parts of a message of a conversation, for a model that sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.api.history import Message
from quire.engine.image_parts import KINDS, image_of, refused_image


def seen_parts(message: Message, where: str, text_of: Callable[..., str]) -> list[dict[str, Any]] | None:
    """Return the parts of a message's content as a chat template reads them; None if none of them is an image.

    ``text_of(parts, where, first=index)``: the text of parts that are no images. ``where``: the message's path.

    Raises:
        RequestError: an image that cannot be read, or that is not in a message of the user; names its path.
    """
    content = message.content
    assert isinstance(content, list)
    if not any(_is_image(part) for part in content):
        return None
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        place = f"{where}.content[{index}]"
        if not _is_image(part):
            parts.append({"type": "text", "text": text_of([part], f"{where}.content", first=index)})
        elif message.role != "user":
            raise refused_image(
                place, f"it is in a message of {message.role!r}, and only the user's may show images"
            )
        else:
            parts.append({"type": "image", "image": image_of(part, place)})
    return parts


def _is_image(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in KINDS


def refuse_images(value: Any, where: str) -> None:
    """Raise `RequestError` for the first image in ``value``, messages of an API that takes none from a model that sees.

    ``where``: its path in the request.
    """
    if isinstance(value, list):
        for index, item in enumerate(value):
            refuse_images(item, f"{where}[{index}]")
    elif isinstance(value, dict):
        if value.get("type") in KINDS or value.get("images"):
            raise refused_image(where, "this endpoint takes no images yet: send it to /v1/chat/completions")
        for key in ("content", "output"):
            refuse_images(value.get(key), f"{where}.{key}")

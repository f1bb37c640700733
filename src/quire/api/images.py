"""Images in the conversations of every API, for a model that sees: `Sight` reads those of one request."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Sequence
from typing import Any

from quire.engine.image_parts import KINDS, decoded_base64, image_of, refused_image, too_many_images
from quire.engine.images import ImageFile
from quire.errors import RequestError
from quire.images.limits import LIMITS
from quire.images.placing import moved

Part = dict[str, Any]


class Sight:
    """The images of one request, in the order of the prompt."""

    def __init__(self, salt: str = "") -> None:
        """``salt``: as of `ImageFile`."""
        self._num_images, self._salt = 0, salt

    def parts(
        self, content: str | list[Any], where: str, role: str, text_of: Callable[..., str]
    ) -> list[Part] | None:
        """Return the parts of a content as a chat template reads them; None if none of them is an image.

        ``text_of(parts, where, first=index)``: the text of parts that are no images. ``where``: the content's path.

        Raises:
            RequestError: an image that cannot be read, or that no message of ``role`` may show; names its path.
        """
        if isinstance(content, str) or not any(map(is_image, content)):
            return None
        return [
            self.image(part, f"{where}[{index}]", role)
            if is_image(part)
            else {"type": "text", "text": text_of([part], where, first=index)}
            for index, part in enumerate(content)
        ]

    def image(self, part: Part, where: str, role: str) -> Part:
        """Return the part of an image as a chat template reads it."""
        if role not in ("user", "tool"):
            raise refused_image(
                where, f"it is in a message of {role!r}, and only those of the user and of tools show images"
            )
        read = part["image"] if isinstance(part.get("image"), ImageFile) else image_of(part, where)
        return self._counted(read)

    def base64_parts(self, images: list[Any], where: str) -> list[Part]:
        """Return the parts of images in base64, which `image` takes as they are. ``where``: the list's path."""
        parts = []
        for index, text in enumerate(images):
            place = f"{where}[{index}]"
            if not isinstance(text, str):
                raise refused_image(place, "it must be a string in base64")
            if text.startswith("data:"):
                parts.append({"type": "image", "image": image_of({"type": "image", "image": text}, place)})
            else:
                parts.append({"type": "image", "image": ImageFile(decoded_base64(text, place), place)})
        return parts

    def restored(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages that were stored as JSON with their images again."""
        return [
            {**message, "content": [self._restored(part) for part in message["content"]]}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]

    def _restored(self, part: Part) -> Part:
        if part.get("type") != "image":
            return part
        return self._counted(ImageFile(b64decode(part["image"]["data"]), "previous_response_id"))

    def _counted(self, image: ImageFile) -> Part:
        self._num_images += 1
        if self._num_images > LIMITS.max_images:
            raise too_many_images(image.where)
        image.salt = self._salt
        return {"type": "image", "image": image}


def is_image(part: Any) -> bool:
    """Whether a part of a message is an image, in any API's form."""
    return isinstance(part, dict) and part.get("type") in KINDS


def behind(context: Sequence[int], prompt: Sequence[int], skipped: int, image_token_id: int) -> Sequence[int]:
    """Return ``prompt`` without its first ``skipped`` ids behind ``context``, the ids of earlier turns.

    Raises:
        RequestError: ``context`` has the place of an image, which ids alone do not bring with them.
    """
    if image_token_id in context:
        raise RequestError(
            "context holds the place of an image, and the image itself is not kept: send the conversation with its "
            "images to /api/chat.",
            param="context",
            code="unsupported_content",
        )
    return moved(prompt, context, skipped)

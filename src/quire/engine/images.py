"""`ImageReader`: the images of conversations, from the bytes that a client sent to spans in the prompt's token ids.

    messages ──take──> messages for the template, files ──> text ──> token ids ──place──> ids with spans

A file is decoded and prepared in a helper process; what came of it is kept by its digest, since a conversation sends
its images again in every turn.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any

from quire.engine import helper_pool
from quire.engine.helper_pool import Head, HelperPool
from quire.engine.prompts import Prompts, RenderedChat
from quire.errors import ModelLoadError, RequestError
from quire.extras import check_installed
from quire.images.limits import LIMITS
from quire.images.placing import SpannedIds, found, with_images, written
from quire.images.prepared import PreparedImage
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.vision_spec import VisionSpec

_PROBE = "quire asks"


@dataclass(slots=True)
class ImageFile:
    """An image of a message. ``where``: its path in the request, for errors.

    ``salt``: what was decoded of it is kept for callers with the same one alone.
    """

    data: bytes
    where: str
    salt: str = ""


class ImageReader:
    """Reads the images of one model's requests."""

    def __init__(self, vision: VisionSpec, tokenizer: Tokenizer, *, in_process: bool = False) -> None:
        """``in_process``: images are decoded in this process, which is the caller's own.

        Raises:
            ModelLoadError: the tokenizer does not know the model's placeholder.
        """
        self._vision, self._tokenizer = vision, tokenizer
        self._in_process = in_process
        self._pool = HelperPool("image", self._head)
        self._kept: OrderedDict[bytes, PreparedImage] = OrderedDict()
        self._num_bytes = 0
        self._own = self._special(vision.image_token_id)
        # What a template writes for an image, where that is not the token of an image.
        self._mark = None if vision.mark_token_id < 0 else self._special(vision.mark_token_id)

    def take(
        self, messages: Sequence[Mapping[str, Any]], *, parts_only: bool
    ) -> tuple[Sequence[Mapping[str, Any]], list[ImageFile]]:
        """Return the messages as a template reads them, and their images in order.

        ``parts_only``: the template drops texts that are no parts (`needs_parts`).
        """
        files: list[ImageFile] = []
        taken: list[Mapping[str, Any]] = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, str) and parts_only:
                content = [{"type": "text", "text": content}]
            if not isinstance(content, list):
                taken.append(message)
                continue
            parts = []
            for part in content:
                if isinstance(part.get("image"), ImageFile):
                    files.append(part["image"])
                    parts.append({"type": "image"})
                else:
                    parts.append(part)
            taken.append({**message, "content": parts})
        return taken, files

    async def place(
        self,
        rendered: RenderedChat,
        files: Sequence[ImageFile],
        tokenize: Callable[[str], Awaitable[Sequence[int]]],
    ) -> Sequence[int]:
        """Return the ids of a prompt with one placeholder per file, with the images in their places.

        Raises:
            RequestError: an image cannot be used (names its path), or the placeholders are not as many as the files.
            CapacityError: too many images wait for the helpers (retryable).
        """
        images = await asyncio.gather(*map(self._read, files))
        text = self._written(rendered.text, images)
        return self._placed(rendered.token_ids if text is None else await tokenize(text), images)

    def place_now(self, rendered: RenderedChat, files: Sequence[ImageFile]) -> Sequence[int]:
        """As `place`, for a caller that may block; only ``in_process``."""
        assert self._in_process
        images = [self._read_here(file) for file in files]
        text = self._written(rendered.text, images)
        return self._placed(rendered.token_ids if text is None else self._encode(text), images)

    def close(self) -> None:
        """End the helpers."""
        self._pool.close()

    def _written(self, text: str, images: Sequence[PreparedImage]) -> str | None:
        """Return ``text`` with what the images show, where both are tokenized together; None: they are not."""
        if self._mark is None:
            return None
        shown = written(text, images, self._mark, self._own)
        return shown if images else None

    def _placed(self, token_ids: Sequence[int], images: Sequence[PreparedImage]) -> SpannedIds:
        if self._mark is not None:
            return found(token_ids, images, self._vision)
        return with_images(token_ids, images, self._vision, self._encode)

    def _special(self, token_id: int) -> str:
        text = self._tokenizer.id_to_token(token_id)
        if text is None or self._encode(text) != [token_id]:
            raise ModelLoadError(
                f"The tokenizer has no special token with the id {token_id}, which config.json names as a placeholder "
                "of images."
            )
        return text

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    async def _read(self, file: ImageFile) -> PreparedImage:
        name = file_name(file)
        if (image := self._kept.get(name)) is not None:
            self._kept.move_to_end(name)
            return image
        work = import_module("quire.images.work")

        def finish(answer: bytearray | None, late: bool) -> PreparedImage:
            if answer is None:
                limit_s = helper_pool.TASK_LIMIT_S
                raise refused(
                    file, f"it takes more than {limit_s:g} s" if late else "it takes too much memory"
                )
            try:
                prepared: PreparedImage = work.read_answer(answer)
            except work.ImageError as error:
                raise refused(file, str(error)) from None
            return prepared

        prepared = await self._pool.run([file.data], finish)
        self._keep(name, prepared)
        return prepared

    def _read_here(self, file: ImageFile) -> PreparedImage:
        work = import_module("quire.images.work")
        try:
            prepared: PreparedImage = work.preparer(self._vision)(file.data)
        except work.ImageError as error:
            raise refused(file, str(error)) from None
        return prepared

    def _keep(self, name: bytes, prepared: PreparedImage) -> None:
        if name not in self._kept:
            self._num_bytes += num_bytes_of(prepared)
        self._kept[name] = prepared
        while self._num_bytes > LIMITS.prepared_bytes:
            self._num_bytes -= num_bytes_of(self._kept.popitem(last=False)[1])

    def _head(self) -> Head:
        return {"vision": asdict(self._vision)}


class SeeingPrompts(Prompts):
    """The prompts of a model that sees: those of conversations may have images."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate, vision: VisionSpec) -> None:
        super().__init__(tokenizer, chat_template)
        self._images = reader_of(vision, tokenizer)
        self._parts_only: bool | None = None  # after the first conversation

    async def chat(self, messages: Sequence[Mapping[str, Any]], *args: Any, **options: Any) -> RenderedChat:
        """As `Prompts.chat`; `ImageFile`s in parts of ``messages`` become spans of the ids."""
        if self._parts_only is None:
            self._parts_only = await asyncio.to_thread(needs_parts, self.render)
        messages, files = self._images.take(messages, parts_only=self._parts_only)
        rendered = await super().chat(messages, *args, **options)
        special = bool(options.get("add_special_tokens", False))
        tokenize = partial(self.tokenize, add_special_tokens=special)
        return RenderedChat(rendered.text, await self._images.place(rendered, files, tokenize))

    def close(self) -> None:
        super().close()
        self._images.close()


def reader_of(vision: VisionSpec, tokenizer: Tokenizer, *, in_process: bool = False) -> ImageReader:
    """Return the reader of a model's images. Raises `ConfigError` without the extra `images`."""
    check_installed("images", "an image in a conversation")
    return ImageReader(vision, tokenizer, in_process=in_process)


def needs_parts(render: Callable[[Sequence[Mapping[str, Any]]], str]) -> bool:
    """Whether a chat template writes a text as a list of parts alone, as that of SmolVLM, and drops a string."""

    def writes(content: Any) -> bool:
        try:
            return _PROBE in render([{"role": "user", "content": content}])
        except RequestError:
            return False

    return not writes(_PROBE) and writes([{"type": "text", "text": _PROBE}])


def file_name(file: ImageFile) -> bytes:
    """Return the name under which what was decoded of ``file`` is kept."""
    key = hashlib.blake2b(file.salt.encode(), digest_size=32).digest()
    return hashlib.blake2b(file.data, digest_size=32, key=key).digest()


def refused(file: ImageFile, reason: str) -> RequestError:
    """Return the error for an image that cannot be used."""
    return RequestError(
        f"{file.where}: this image cannot be used: {reason}.", param=file.where, code="invalid_image"
    )


def num_bytes_of(prepared: PreparedImage) -> int:
    return sum(len(piece.data) for piece in prepared.pieces)

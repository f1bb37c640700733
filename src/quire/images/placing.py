"""Images in a prompt's token ids: each placeholder becomes the image's text, whose runs of placeholders are spans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, islice
from typing import Any

from quire.errors import RequestError
from quire.images.prepared import PreparedImage
from quire.spans import Span
from quire.vision_spec import VisionSpec


class SpannedIds(tuple[int, ...]):
    """The token ids of a prompt, and its spans."""

    spans: tuple[Span, ...] = ()

    def __getitem__(self, at: Any) -> Any:
        """Return the id at ``at``. A slice would lose its spans, so there is none.

        Raises:
            RequestError: ``at`` is a slice, which `truncate_prompt_tokens` takes.
        """
        if isinstance(at, slice):
            raise RequestError(
                "truncate_prompt_tokens is not supported for a prompt with images: leave it out, or send less.",
                param="truncate_prompt_tokens",
            )
        return super().__getitem__(at)


def moved(ids: Sequence[int], before: Sequence[int], skipped: int) -> SpannedIds:
    """Return ``before`` and all of ``ids`` but the first ``skipped``, which no span has, with the spans of ``ids``."""
    shift, spans = len(before) - skipped, getattr(ids, "spans", ())
    assert all(span.start >= skipped for span in spans)
    placed = SpannedIds((*before, *islice(ids, skipped, None)))
    placed.spans = tuple(span._replace(start=span.start + shift) for span in spans)
    return placed


def with_images(
    token_ids: Sequence[int],
    images: Sequence[PreparedImage],
    vision: VisionSpec,
    encode: Callable[[str], Sequence[int]],
) -> SpannedIds:
    """Return ``token_ids`` with ``images`` in place of the placeholders, in order.

    ``encode`` tokenizes the text of an image.

    Raises:
        RequestError: there are more or fewer placeholders than images: a text may not hold the placeholder's own text.
    """
    image_token_id = vision.image_token_id
    count = sum(1 for token_id in token_ids if token_id == image_token_id)
    if count != len(images):
        raise _other_number(count, len(images))
    ids: list[int] = []
    spans: list[Span] = []
    left = iter(images)
    for token_id in token_ids:
        if token_id != image_token_id:
            ids.append(token_id)
            continue
        image = next(left)
        shown = encode(image.text)
        start, pieces = len(ids), iter(image.pieces)
        for is_image, run in groupby(shown, lambda token_id: token_id == image_token_id):
            length = len(list(run))
            if is_image:
                piece = next(pieces)
                assert length == vision.num_tokens(piece.grid), (length, image.text)
                spans.append(piece.span(start, length, whole=vision.both_ways))
            start += length
        assert next(pieces, None) is None, image.text
        ids.extend(shown)
    placed = SpannedIds(ids)
    placed.spans = tuple(spans)
    return placed


def written(text: str, images: Sequence[PreparedImage], mark: str, own: str) -> str:
    """Return the text of a prompt with what ``images`` show in place of each ``mark``, in order.

    So a text and what stands next to an image are tokenized together. ``own``: the text of an image's token.

    Raises:
        RequestError: there are more or fewer marks than images, or the text of a message holds a token of an image.
    """
    around = text.split(mark)
    if len(around) - 1 != len(images) or own in text:
        raise _other_number(len(around) - 1 + text.count(own), len(images))
    return around[0] + "".join(image.text + part for image, part in zip(images, around[1:], strict=True))


def found(token_ids: Sequence[int], images: Sequence[PreparedImage], vision: VisionSpec) -> SpannedIds:
    """Return ``token_ids``, those of a `written` text, with a span for each run of an image's tokens."""
    pieces = iter([piece for image in images for piece in image.pieces])
    spans: list[Span] = []
    start = 0
    for is_image, run in groupby(token_ids, lambda each: each == vision.image_token_id):
        length = len(list(run))
        if is_image:
            piece = next(pieces)
            assert length == vision.num_tokens(piece.grid), length
            spans.append(piece.span(start, length, whole=vision.both_ways))
        start += length
    assert next(pieces, None) is None
    placed = SpannedIds(token_ids)
    placed.spans = tuple(spans)
    return placed


def _other_number(count: int, num_images: int) -> RequestError:
    return RequestError(
        f"The prompt has {count} placeholders of images and {num_images} images: the text of a message may not hold "
        "the model's own placeholder, and the model's chat template must write one per image.",
        param="messages",
        code="invalid_value",
    )

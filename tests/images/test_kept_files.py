"""Files that were decoded are kept for callers of the same salt, within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from tests.api.fake_frontend import byte_tokenizer

from quire.engine import images
from quire.engine.images import ImageFile, ImageReader
from quire.engine.prompts import RenderedChat
from quire.images.prepared import Piece, PreparedImage
from quire.vision_spec import VisionSpec

# The placeholder of a tokenizer of bytes.
MARK = "<|end|>"


class Helpers:
    """Counts the files that helpers are given, and answers each with the same piece."""

    num_files = 0

    def __init__(self, *_: Any) -> None: ...

    async def run(self, frame: Sequence[bytes], finish: Callable[[Any, bool], Any]) -> Any:
        Helpers.num_files += 1
        made = PreparedImage(MARK * 4, (Piece((8, 8), bytes(64)),))
        return finish(b"=" + msgspec.msgpack.encode(made), False)


async def no_text(text: str) -> Sequence[int]:
    raise AssertionError(text)


def test_decoded_files_are_not_shared_between_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or who times first tokens would learn that another tenant sent the same file."""
    monkeypatch.setattr(images, "HelperPool", Helpers)
    monkeypatch.setattr(Helpers, "num_files", 0)
    tokenizer = byte_tokenizer()
    (mark,) = tokenizer.encode(MARK, add_special_tokens=False)
    reader = ImageReader(VisionSpec("idefics3", 8, 1, 1, 8, "gelu", 1e-6, 8, 2, 2, 8, mark), tokenizer)
    counts = []
    for salt in ("", "", "a", "a", "b", ""):
        asyncio.run(reader.place(RenderedChat("", [1, mark]), [ImageFile(b"a file", "where", salt)], no_text))
        counts.append(Helpers.num_files)
    assert counts == [1, 1, 2, 2, 3, 3]

"""What spans (images) add to the hashes of blocks, so that a chain names everything that K and V depend on.

    position      0 …… 15 │ 16 …… 31 │ 32 …… 47 │ 48 …… 63        block size 16
    span                20 ═══════════════════ 52                  length 32, from position 20 on
    adds             –    │ d, −4    │ d, 12    │ d, 28            the digest of its content, and where the block
                                                                   begins in it

The token ids of a span are all alike, so the ids of a block do not say which image it shows, nor which part of it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from quire.cache.blocks import BlockTable
from quire.spans import Span


def add_spans(table: BlockTable, spans: Sequence[Span]) -> None:
    """Let the hashes of ``table``, which has none yet, name the contents of ``spans``."""
    assert not table.chain
    table.spans = content_of_blocks(spans, table.block_size)


def content_of_blocks(spans: Sequence[Span], block_size: int) -> dict[int, bytes]:
    """Return, for each row of blocks that has tokens of ``spans``, the bytes that its hash takes after the ids."""
    content: dict[int, bytes] = {}
    for span in spans:
        for row in range(span.start // block_size, (span.end - 1) // block_size + 1):
            part = span.content + struct.pack("<qQ", row * block_size - span.start, span.length)
            content[row] = content.get(row, b"") + part
    return content

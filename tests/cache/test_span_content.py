"""Hashes of blocks with spans: they name the content of every span that a block has a token of, and nothing else."""

from __future__ import annotations

import pytest

from quire.cache.prefix_cache import extend_chain, root_hash
from quire.cache.span_content import content_of_blocks
from quire.spans import Span

SIZE, IDS = 8, [7] * 64
ROOT = root_hash("model", SIZE)


def chain(*spans: tuple[int, int, str]) -> list[bytes]:
    """Return the chain of 64 equal tokens with (start, length, content)."""
    made = [Span(start, length, content.encode().ljust(32), (4, 4), b"") for start, length, content in spans]
    hashes: list[bytes] = []
    extend_chain(hashes, ROOT, IDS, SIZE, content_of_blocks(made, SIZE) if made else None)
    return hashes


def num_shared(first: list[bytes], second: list[bytes]) -> int:
    assert len(first) == len(second) == len(IDS) // SIZE
    shared = sum(a == b for a, b in zip(first, second, strict=True))
    assert first[:shared] == second[:shared]  # a chain that parted stays apart
    return shared


@pytest.mark.parametrize("start", [0, 1, 7, 8, 9, 15, 40, 63])
def test_chain_parts_at_first_block_of_span(start: int) -> None:
    for length in {1, min(9, 64 - start), 64 - start}:
        assert num_shared(chain((start, length, "cat")), chain()) == start // SIZE
        assert num_shared(chain((start, length, "cat")), chain((start, length, "dog"))) == start // SIZE


def test_every_block_of_a_span_depends_on_its_content() -> None:
    """Each block by itself, with the same parent."""
    for row in range(2, 6):
        parts = [
            content_of_blocks([Span(20, 26, name.ljust(32), (), b"")], SIZE)[row] for name in (b"cat", b"dog")
        ]
        assert parts[0] != parts[1]
    assert sorted(content_of_blocks([Span(20, 26, b"cat", (), b"")], SIZE)) == [2, 3, 4, 5]


def test_place_and_length_of_a_span_count() -> None:
    base = chain((10, 12, "cat"))
    assert num_shared(base, chain((11, 12, "cat"))) == 1
    assert num_shared(base, chain((10, 13, "cat"))) == 1
    assert num_shared(base, chain((10, 12, "cat"), (30, 5, "dog"))) == 3
    assert num_shared(chain((10, 2, "cat"), (12, 2, "dog")), chain((10, 2, "dog"), (12, 2, "cat"))) == 1


def test_text_after_a_span_shares_blocks_of_the_same_image_alone() -> None:
    assert chain((3, 9, "cat")) == chain((3, 9, "cat"))
    assert num_shared(chain((3, 9, "cat"), (50, 4, "dog")), chain((3, 9, "cat"), (50, 4, "owl"))) == 6

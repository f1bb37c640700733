"""Bodies that a client has coded: both deflates, several members, damage, and the largest piece at once."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable

import pytest

from quire.errors import RequestError
from quire.http.codings import STEP_BYTES, Decoder, find_decoder
from quire.http.refusals import HttpError

TEXT = b'{"prompt": "' + b"ab" * 5000 + b'"}'


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def decoder(coding: str) -> Decoder:
    found = find_decoder(coding.encode())
    assert found is not None
    return found


def decoded(coding: str, pieces: Iterable[bytes]) -> bytes:
    unpack = decoder(coding)
    data = b"".join(part for piece in pieces for part in unpack.decode(piece))
    unpack.end()
    return data


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(TEXT)),
        ("X-GZIP", gzip.compress(TEXT)),
        ("gzip", gzip.compress(TEXT[:99]) + gzip.compress(TEXT[99:])),
        ("deflate", zlib.compress(TEXT)),
        ("deflate", raw_deflate(TEXT)),
    ],
    ids=["gzip", "x-gzip", "two members", "with zlib's head", "without a head"],
)
def test_a_body_is_decoded_however_it_is_cut(coding: str, body: bytes) -> None:
    assert decoded(coding, [body]) == TEXT
    assert decoded(coding, [body[i : i + 1] for i in range(len(body))]) == TEXT


def test_a_small_body_gives_no_large_piece() -> None:
    body = gzip.compress(bytes(8 * STEP_BYTES))
    sizes = [len(part) for part in decoder("gzip").decode(body)]
    assert sum(sizes) == 8 * STEP_BYTES
    assert max(sizes) <= STEP_BYTES


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(TEXT)[:-1]),
        ("gzip", b""),
        ("gzip", b"\x1f"),
        ("gzip", TEXT),
        ("deflate", zlib.compress(TEXT) + b"more"),
        ("deflate", zlib.compress(TEXT)[:40]),
    ],
    ids=["cut", "empty", "one byte", "plain", "more behind its end", "cut deflate"],
)
def test_a_body_of_another_coding_is_refused(coding: str, body: bytes) -> None:
    with pytest.raises(RequestError, match=f"not {coding}") as raised:
        decoded(coding, [body])
    assert raised.value.code == "invalid_encoding"


def test_an_unknown_coding_is_answered_with_the_known_ones() -> None:
    assert find_decoder(None) is None
    assert find_decoder(b" Identity ") is None
    with pytest.raises(HttpError) as raised:
        find_decoder(b"br")
    assert raised.value.refusal.status == 415
    assert dict(raised.value.refusal.headers)[b"accept-encoding"].startswith(b"gzip, deflate")

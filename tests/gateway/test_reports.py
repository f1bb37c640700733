"""Worker-reported routing: what replicas say of their caches, and of the blocks of a text."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.api.fake_frontend import byte_tokenizer
from tests.gateway.live import Live, Scripted, backends, gateway_of, says
from tests.gateway.test_shares import KEY, timed_replica

from quire.api.piece_blocks import piece_blocks, piece_ends, telling_blocks
from quire.cache.events import SHORT_HASH_BYTES, BlockRemoved, BlockStored, pack, unpack
from quire.cache.prefix_cache import extend_chain, root_hash
from quire.config import CacheConfig
from quire.http.cache_messages import BEAT, EVENTS, PIECES_HEADER, SNAPSHOT, message, messages
from quire.text.digest import digested_text
from quire_gateway.prefix_index import KnownPrefixes, PieceNames

STORY = " ".join(f"A fox number {i} went over the hill to see its friend." for i in range(60))


def test_events_survive_the_wire_with_their_groups() -> None:
    hashes = [bytes([i]) * 32 for i in range(4)]
    events = [BlockStored(hashes[0], b"p", (1, 2), (0,)), BlockStored(hashes[1], b"", (), (0, 2)),
              BlockRemoved(hashes[1], (2,)), BlockRemoved(hashes[3], (0, 9))]  # fmt: skip
    found = list(unpack(pack(events)))
    assert [each.block_hash for each in found] == [
        h[:SHORT_HASH_BYTES] for h in (*hashes[:2], hashes[1], hashes[3])
    ]
    assert [each.groups for each in found] == [(0,), (0, 2), (2,), (0, 6)]
    assert [type(each) for each in found] == [BlockStored, BlockStored, BlockRemoved, BlockRemoved]


@pytest.mark.parametrize("seed", range(3))
def test_messages_come_whole_and_a_gap_is_an_error(seed: int) -> None:
    random = Random(seed)
    sent = [(SNAPSHOT, b"abc"), (BEAT, b""), (EVENTS, b"x" * 50_000), (EVENTS, b"y")]
    data = b"".join(message(kind, i + 1, payload) for i, (kind, payload) in enumerate(sent))

    async def cut(whole: bytes) -> AsyncIterator[bytes]:
        while whole:
            size = random.choice((1, 7, 9_999))
            yield whole[:size]
            whole = whole[size:]

    async def read(whole: bytes) -> list[tuple[int, bytes]]:
        return [each async for each in messages(cut(whole))]

    assert asyncio.run(read(data)) == sent
    with pytest.raises(ValueError, match="message 4 of kind 1 came where 3 was expected"):
        asyncio.run(read(data.replace(message(EVENTS, 3, b"x" * 50_000), b"")))


def test_a_piece_ends_where_the_prompt_has_its_text() -> None:
    body = {
        "tools": [{"type": "function", "name": "t" * 300}],
        "messages": [
            {"role": "system", "content": "s" * 150},
            {"role": "user", "content": " " + "u" * 300 + "\n"},
        ],
    }
    prompt = "<|system|>" + "s" * 150 + "[tool t]" + "<|user|>" + "u" * 300 + "<|end|>"
    text, ends = digested_text(body), piece_ends(body, 100, prompt.encode())
    assert len(ends) == len(text) // 100
    # "system\1" has 7 bytes: the first piece ends with the 93rd s. Tools are not found: their pieces end with the s.
    begin = prompt.index("u" * 9)
    user = text.index(b"u" * 9)
    for i, end in enumerate(ends):
        at = 100 * (i + 1)
        expected = 10 + min(at - 7, 150) if at < user else begin + min(at - user, 300)
        assert end == expected, (i, end)


def test_the_blocks_of_a_shared_text_are_the_same() -> None:
    cache = CacheConfig(num_blocks=8, block_size=16, model_key="m")
    tokenizer = byte_tokenizer()

    def told(text: str) -> list[bytes]:
        ids = tokenizer.encode(text)
        value = piece_blocks({"prompt": text}, 100, text, ids, tokenizer, cache, adapter="", cache_salt="s")
        data = base64.b64decode(value)
        return [data[i : i + SHORT_HASH_BYTES] for i in range(0, len(data), SHORT_HASH_BYTES)]

    one, two = told(STORY[:1000]), told(STORY[:550] + "?" * 450)
    assert len(one) == 10
    assert one[:5] == two[:5]
    assert not set(one[5:]) & set(two[5:])
    chain: list[bytes] = []
    extend_chain(chain, root_hash("m", 16, cache_salt="s"), tokenizer.encode(STORY[:1000]), 16)
    assert one == [chain[100 * (i + 1) // 16 - 1][:SHORT_HASH_BYTES] for i in range(10)]
    assert piece_blocks({}, 100, None, [1], tokenizer, cache, adapter="", cache_salt="") == b""


@pytest.mark.parametrize("has_image", [False, True])
def test_blocks_are_not_told_of_prompts_with_images(has_image: bool) -> None:
    """A gateway's text does not hold them, and the hashes of blocks do."""

    class Ids(tuple[int, ...]):
        spans = ("an image",) if has_image else ()

    settings = SimpleNamespace(gateway_key=KEY, cache=CacheConfig(num_blocks=8, block_size=16, model_key="m"))
    headers = [(PIECES_HEADER.encode(), b"64"), (b"x-quire-gateway-key", KEY.encode())]
    job: Any = SimpleNamespace(prompts=[Ids((1, 2))], prompt_text="text")

    async def send(message: Any) -> None: ...

    state: Any = SimpleNamespace(settings=settings)
    streams: Any = None
    told = telling_blocks(send, {"headers": headers}, state, {}, job, streams)
    assert (told is send) == has_image


def test_known_text_finds_reported_blocks() -> None:
    known = KnownPrefixes("prefix-reported", 64, of_text=True)
    pieces, blocks = [bytes([i]) for i in range(4)], [bytes([i]) * 16 for i in range(4)]
    assert known.report(1, [BlockStored(each, b"", (), (0,)) for each in blocks[:3]])
    assert known.depths(pieces, 2) == [0, 0]  # no answer has named the blocks
    assert known.names is not None
    known.names.learn(pieces, blocks[:2])
    assert known.depths(pieces, 2) == [0, 2]
    known.names.learn(pieces, blocks)
    assert known.depths(pieces, 2) == [0, 3]
    assert known.report(1, [BlockRemoved(blocks[2], (0,)), BlockRemoved(blocks[1], (0,))])
    assert known.depths(pieces, 2) == [0, 1]
    known.forget_report(1)
    assert known.depths(pieces, 2) == [0, 0]
    names = PieceNames(128)
    for i in range(1000):
        names.learn([i.to_bytes(2, "big")], [b"b"])
        names.learn([b"kept"], [b"b"])
    assert len(names) <= 130
    assert names.of([b"kept", b"gone"]) == [b"b"]


def test_replicas_report_what_they_hold(tmp_path: Path) -> None:
    async def depths(live: Live, body: dict[str, Any]) -> dict[str, int]:
        """Ask once more; return what the route's header says of each backend's prefix before that."""
        status, answer = await live.post(body, x_quire_explain="1")
        assert status == 200, answer
        route = json.loads(live.headers["x-quire-route"])
        return {name: each["prefix"] for name, each in route["backends"].items()}

    async def until_depths(live: Live, body: dict[str, Any], **expected: int) -> None:
        async with asyncio.timeout(60):
            while (found := await depths(live, body)) != expected:
                await asyncio.sleep(0.05)
            assert found == expected

    async def main(url: str) -> None:
        other = Scripted(says("x"), models=("quill",))
        async with backends(other):
            config = {
                "backends": [{"name": "r0", "url": url}, {"name": "r1", "url": other.url}],
                "routing": {"policy": "prefix-reported", "max_load_ratio": 8.0},
                "gateway_key": KEY,
            }
            body = {"model": "quill", "prompt": STORY[:2600], "max_tokens": 1}
            async with gateway_of(config) as live:
                assert await depths(live, body) == {"r0": 0, "r1": 0}
                assert "x-quire-blocks" not in live.headers
                await until_depths(live, body, r0=2, r1=0)
                assert live.headers["x-quire-backend"] == "r0"
                await until_depths(live, body | {"prompt": STORY[:1500] + STORY[100:1100]}, r0=1, r1=0)
            async with gateway_of(config) as live:  # another gateway begins with a snapshot
                await until_depths(live, body, r0=2, r1=0)

    with timed_replica(tmp_path, max_model_len=1024) as replica:
        asyncio.run(asyncio.wait_for(main(replica.url), 120))

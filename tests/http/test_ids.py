"""Ids that grant something: each comes from the system's randomness, so that no other id tells of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from tests.api.asgi_client import Api
from tests.gateway.live import Scripted, gateway, says

from quire.http.edge import new_id
from quire_gateway.exchange import Exchange
from quire_gateway.stage import Stage

NUM_WORDS = 624  # of the state of a Mersenne Twister


def unshifted(value: int, invert: Callable[[int], int]) -> int:
    """Undo ``value ^ f(value)``, where ``invert`` is f: each round makes more bits right."""
    found = value
    for _ in range(32):
        found = value ^ invert(found)
    return found


def untempered(word: int) -> int:
    """Return the word of the generator's state that it shows as ``word``."""
    word = unshifted(word, lambda found: found >> 18)
    word = unshifted(word, lambda found: found << 15 & 0xEFC60000)
    word = unshifted(word, lambda found: found << 7 & 0x9D2C5680)
    return unshifted(word, lambda found: found >> 11)


def predicted(ids: list[str]) -> str:
    """Return the id after ``ids`` if a Mersenne Twister made them, four words each."""
    words = [int(text, 16) >> shift & 0xFFFFFFFF for text in ids for shift in (0, 32, 64, 96)]
    generator = Random()
    generator.setstate((3, (*map(untempered, words[-NUM_WORDS:]), NUM_WORDS), None))
    return f"{generator.getrandbits(128):032x}"


def test_ids_do_not_tell_the_next_one() -> None:
    """156 ids give away the whole state of the generator that was used before; ours has none."""
    generator = Random(os.urandom(16))
    old = [f"{generator.getrandbits(128):032x}" for _ in range(NUM_WORDS // 4)]
    assert predicted(old) == f"{generator.getrandbits(128):032x}"
    ours = [new_id() for _ in range(NUM_WORDS // 4)]
    assert predicted(ours) != new_id()
    assert len(set(ours)) == len(ours)
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in ours)


def test_forks_do_not_repeat_ids() -> None:
    new_id()
    ids: list[str] = []
    for _ in range(3):
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, " ".join(new_id() for _ in range(50)).encode())
            os._exit(0)
        os.close(write)
        with open(read) as pipe:
            ids += pipe.read().split()
        os.waitpid(child, 0)
    ids += [new_id() for _ in range(50)]
    assert len(set(ids)) == len(ids) == 200


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the system's source; what it gave, in hexadecimal."""
    given: list[str] = []
    numbers = itertools.count(1)

    def urandom(size: int) -> bytes:
        data = (b"%x" % (0xABC000 + next(numbers))).rjust(size, b"\xee")[:size]
        given.append(data.hex())
        return data

    monkeypatch.setattr(os, "urandom", urandom)
    return given


def drawn(value: str, given: list[str]) -> bool:
    """Whether an id is, behind its prefix, what the system gave."""
    return re.sub("^[a-z]+[-_]", "", value) in given


def test_every_id_of_a_server_is_the_systems(tmp_path: Path, system: list[str]) -> None:
    api = Api(batch_dir=str(tmp_path / "jobs"), journal_dir=tmp_path / "journal")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    found: dict[str, str] = {}
    answer = api.post("/v1/chat/completions", chat)
    found["request"], found["completion"] = answer.headers["x-request-id"], answer.json()["id"]
    found["response"] = api.post("/v1/responses", {"model": "tiny", "input": "hi"}).json()["id"]
    background = api.post("/v1/responses", {"model": "tiny", "input": "hi", "background": True})
    found["background"] = background.json()["id"]
    found["message"] = api.post("/v1/messages", {**chat, "max_tokens": 5}).json()["id"]
    stream = api.post("/v1/chat/completions", {**chat, "stream": True}).text
    found["stream"] = stream.partition("id: ")[2].partition(":")[0]
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    upload = api.call(
        "POST", "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", json.dumps(line).encode())}
    )
    found["file"] = upload.json()["id"]
    batch = {
        "input_file_id": found["file"],
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }
    found["batch"] = api.post("/v1/batches", batch).json()["id"]
    many = {"requests": [{"custom_id": "a", "params": {**chat, "max_tokens": 5}}]}
    found["message batch"] = api.post("/v1/messages/batches", many).json()["id"]
    assert {kind: value for kind, value in found.items() if not drawn(value, system)} == {}
    assert len(set(found.values())) == len(found)


async def gateways_ids() -> dict[str, str]:
    answers: list[str] = []

    class Remembering(Stage):
        async def enter(self, exchange: Exchange) -> None:
            assert exchange.continuation is not None
            answers.append(exchange.continuation.answer_id)

    async with gateway(Scripted(says("hi")), gateway_key="k", stages=[Remembering()]) as live:
        await live.post({"model": "m", "prompt": "x"})
        found = {"request": live.headers["x-request-id"]}
        found["ledger"] = live.state.new_id()
        found["answer"] = answers[0]
    return found


def test_every_id_of_a_gateway_is_the_systems(system: list[str]) -> None:
    found = asyncio.run(gateways_ids())
    assert {kind: value for kind, value in found.items() if not drawn(value, system)} == {}

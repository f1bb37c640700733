"""`Journal`: what is on disk of a stream, what a server that comes later finds of it, and what it costs at most."""

from __future__ import annotations

import asyncio
import errno
import stat
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from quire.api import journal_file
from quire.api.job import Usage
from quire.api.journal import KEPT_S, Entry, Journal, parse_event_id
from quire.api.journal_file import End, Head
from quire.api.passage import delivered_chunks
from quire.api.relayed import Delivered, Relayed, write_tag
from quire.engine.output import OutputChunk
from quire.errors import ConfigError, NotFoundError, RequestError
from quire.http.call import AnswerName
from quire.http.refusals import HttpError
from quire.request import FinishReason

NAMES = [f"chatcmpl-{number:032x}" for number in range(8)]
BODY = b'{"stream":true,\n"messages":[]}'


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def run(go: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(go())


@asynccontextmanager
async def opened(
    folder: Path, clock: Clock, *, max_bytes: int = 1 << 20, ready: bool = True
) -> AsyncIterator[Journal]:
    made = Journal(folder, max_bytes, clock, lambda: ready)
    try:
        yield made
    finally:
        await made.close()


async def begin(made: Journal, name: str, tenant: str = "") -> Entry | None:
    head = Head("/v1/chat/completions", tenant, f"{name[9:]} 1700000000 7", "fp", 0.0, len(BODY))
    return await made.begin(name, head, [BODY[:5], BODY[5:]])


def chunk(token_id: int) -> bytes:
    return write_tag(0, OutputChunk(0, "a", (token_id,)), 0)


async def resume(
    made: Journal, name: str, num_seen: int, tenant: str = ""
) -> tuple[bytes, Sequence[Delivered], End | None]:
    entry = await made.resume(tenant, name, num_seen)
    found = entry.body, entry.delivered, entry.end
    await made.release(entry)
    return found


def test_a_stream_is_found_again_by_another_server(tmp_path: Path) -> None:
    async def go() -> None:
        clock = Clock()
        async with opened(tmp_path, clock) as first:
            entry = await begin(first, NAMES[0])
            assert entry is not None
            assert await entry.chunk(chunk(5), b"data: a\n\ndata: b\n\n") == (
                b"id: %b:1\ndata: a\n\nid: %b:2\ndata: b\n\n" % ((NAMES[0].encode(),) * 2)
            )
            assert await entry.chunk(chunk(6), b"") == b""
            path = tmp_path / f"{NAMES[0]}.journal"
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            async with opened(tmp_path, clock) as second:
                with pytest.raises(HttpError, match="another connection") as runs:
                    await second.resume("", NAMES[0], 1)
                assert runs.value.refusal.status == 409
            await first.release(entry)
        with path.open("ab") as file:
            file.write(b"[9,[0,[812],16,nul")  # the server died in the middle of it
        async with opened(tmp_path, clock) as third:
            found = await third.resume("", NAMES[0], 1)
            assert found.body == BODY
            assert found.delivered == [Delivered(0, (5,), 0), Delivered(0, (6,), 0)]
            assert found.numbered(b"data: a\n\ndata: b\n\n") == b"id: %b:2\ndata: b\n\n" % NAMES[0].encode()
            await found.chunk(chunk(7), b"data: c\n\n")
            await found.finish(500, b"data: error\n\n")
            await third.release(found)
            _, delivered, end = await resume(third, NAMES[0], 4)
            assert [each.token_ids for each in delivered] == [(5,), (6,), (7,)]
            assert end == End(500, 4, "data: error\n\n")
            with pytest.raises(RequestError, match="has 4 events"):
                await third.resume("", NAMES[0], 5)

    run(go)


def test_a_stream_is_kept_for_a_minute_after_its_end(tmp_path: Path) -> None:
    async def go() -> None:
        clock = Clock()
        async with opened(tmp_path, clock) as first:
            entries = [await begin(first, name) for name in NAMES[:2]]
            for entry in entries:
                assert entry is not None
                await entry.chunk(chunk(5), b"data: a\n\n")
            assert entries[0] is not None
            await first.release(entries[0])
            clock.now_s += KEPT_S - 1
            first.sweep()
            await resume(first, NAMES[0], 1)  # a client that comes back begins the time again
            clock.now_s += KEPT_S
            first.sweep()
            with pytest.raises(NotFoundError, match="60 s after its end"):
                await first.resume("", NAMES[0], 1)
            assert [path.stem for path in tmp_path.iterdir()] == NAMES[1:2], "that one runs"
        assert entries[1] is not None
        entries[1].file.close()
        ready = [False]
        left = Journal(tmp_path, 1 << 20, clock, lambda: ready[0])
        for _ in range(3):  # the model is loaded for longer than a minute
            clock.now_s += KEPT_S
            left.sweep()
        ready[0] = True
        clock.now_s += KEPT_S - 1
        left.sweep()
        await resume(left, NAMES[1], 1)
        clock.now_s += KEPT_S
        left.sweep()
        await left.close()
        assert not list(tmp_path.iterdir())

    run(go)


def test_a_stream_is_its_tenants_alone(tmp_path: Path) -> None:
    async def go() -> None:
        async with opened(tmp_path, Clock()) as made:
            entry = await begin(made, NAMES[0], tenant="alice")
            assert entry is not None
            await entry.chunk(chunk(5), b"data: a\n\n")
            await made.release(entry)
            for tenant, name in (
                ("", NAMES[0]),
                ("bob", NAMES[0]),
                ("alice", NAMES[1]),
                ("alice", "../../etc/passwd"),
            ):
                with pytest.raises(NotFoundError, match="There is no stream"):
                    await made.resume(tenant, name, 1)
            assert (await resume(made, NAMES[0], 1, "alice"))[0] == BODY

    run(go)


@pytest.mark.parametrize("state", ["runs here", "runs in another server", "is cut"])
def test_another_tenant_does_not_touch_a_stream(tmp_path: Path, state: str) -> None:
    """Whatever its state, the answer is that of an id which does not exist, and the stream goes on."""

    async def go() -> None:
        async with opened(tmp_path, Clock()) as made, opened(tmp_path, Clock()) as other:
            entry = await begin(made, NAMES[0], tenant="alice")
            assert entry is not None
            ended = asyncio.Event()

            async def end() -> None:
                ended.set()
                await made.release(entry)

            entry.end_request = end
            if state == "is cut":
                made._cut(entry, "the disk is full")
            asked = other if state == "runs in another server" else made
            with pytest.raises(NotFoundError, match="There is no stream"):
                await asyncio.wait_for(asked.resume("bob", NAMES[0], 0), 60.0)
            assert not ended.is_set()
            assert b"data: a" in await entry.chunk(chunk(5), b"data: a\n\n")
            if state == "runs here":
                assert (await resume(made, NAMES[0], 0, "alice"))[0] == BODY
                assert ended.is_set()
                return
            with pytest.raises(HttpError, match=r"another connection|disk was full"):
                await asked.resume("alice", NAMES[0], 0)
            await made.release(entry)

    run(go)


def test_a_full_disk_stops_the_journal_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        async with opened(tmp_path, Clock()) as made:
            entry, other = await begin(made, NAMES[0]), await begin(made, NAMES[1])
            assert entry is not None
            assert other is not None
            with monkeypatch.context() as patch:
                patch.setattr(journal_file.os, "write", full)
                for _ in range(3):
                    assert b"data: a" in await entry.chunk(chunk(5), b"data: a\n\n")
                assert await begin(made, NAMES[2]) is None
            assert b":1\ndata: a" in await other.chunk(chunk(5), b"data: a\n\n")
            with pytest.raises(HttpError, match="disk was full") as refused:
                await made.resume("", NAMES[0], 1)
            assert refused.value.refusal.status == 507
            for each in (entry, other):
                await made.release(each)
            await resume(made, NAMES[1], 1)
        assert [path.stem for path in tmp_path.iterdir()] == NAMES[1:2]

    def full(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    run(go)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == ["journal_full"]


def test_the_journal_is_bounded(tmp_path: Path) -> None:
    async def go() -> None:
        async with opened(tmp_path, Clock(), max_bytes=2_000) as made:
            for name in NAMES[:4]:
                entry = await begin(made, name)
                assert entry is not None
                while entry.num_bytes < 700:
                    await entry.chunk(chunk(5), b"data: a\n\n")
                await made.release(entry)
            kept = {path.stem for path in tmp_path.iterdir()}
            assert kept == set(NAMES[2:4]), "those that ended first make room"
            running = await begin(made, NAMES[4])
            assert running is not None
            while not running.is_cut:
                assert b"data: a" in await running.chunk(chunk(5), b"data: a\n\n")
                assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 2_000
            await made.release(running)

    run(go)


def test_no_running_stream_makes_room_for_another(tmp_path: Path) -> None:
    async def go() -> None:
        async with opened(tmp_path, Clock(), max_bytes=2_000) as made:
            running = [await begin(made, name) for name in NAMES[:2]]
            for entry in running:
                assert entry is not None
                while entry.num_bytes < 940:
                    await entry.chunk(chunk(5), b"data: a\n\n")
            assert await begin(made, NAMES[2]) is None, "it goes on without a journal"
            for entry in running:
                assert entry is not None
                assert not entry.is_cut
                await made.release(entry)
            for name in NAMES[:2]:
                assert (await resume(made, name, 0))[0] == BODY
            assert {path.stem for path in tmp_path.iterdir()} == set(NAMES[:2])

    run(go)


@pytest.mark.parametrize("given", [b"", b"17", b"a:b", b"a:-1", "a:٣".encode(), b"a:" + b"9" * 20])
def test_a_wrong_event_id_is_refused(given: bytes) -> None:
    with pytest.raises(RequestError, match="Last-Event-ID"):
        parse_event_id(given)


def test_event_ids_are_read_with_and_without_the_stream() -> None:
    assert parse_event_id(b" chatcmpl-1:17 ") == ("chatcmpl-1", 17)
    assert parse_event_id(b"17", "x") == parse_event_id(b"x:17", "x") == ("x", 17)
    with pytest.raises(RequestError):
        parse_event_id(b"y:17", "x")


def test_a_folder_that_cannot_be_used_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--journal .* cannot be used"):
        Journal(tmp_path / "file", 1 << 20, Clock(), lambda: True)


class Finished:
    """Metrics of a prompt: which choices were told to have ended."""

    def __init__(self) -> None:
        self.choices: list[int] = []

    def finish(self, choice: int, reason: str, now_s: float) -> None:
        self.choices.append(choice)


@pytest.mark.parametrize("seed", range(20))
def test_a_replay_has_the_order_of_its_events(seed: int) -> None:
    """Events of several prompts mix in a journal; the prompts are replayed apart, and their events told as written."""
    rng, num_prompts, n = Random(seed), 3, 2
    left = {choice: rng.randrange(1, 5) for choice in range(num_prompts * n)}
    written: list[Delivered] = []
    while left:
        choice = rng.choice(sorted(left))
        left[choice] -= 1
        reason = None if left[choice] else FinishReason.LENGTH
        written.append(Delivered(choice, (len(written),), 0, reason))
        if not left[choice]:
            del left[choice]
    relayed = Relayed(AnswerName("cmpl-1", 0, 7), written, by_gateway=False)
    job: Any = SimpleNamespace(sampling=SimpleNamespace(n=n))
    state: Any = SimpleNamespace(now=lambda: 0.0)
    streams = SimpleNamespace(prompts=[])
    generation: Any = SimpleNamespace(state=state, job=job, streams=streams, usage=Usage())
    finished = [Finished() for _ in range(num_prompts)]
    for prompt, metrics in enumerate(finished):
        events = relayed.of_prompt(prompt, n).delivered
        chunks = [
            OutputChunk(e.sample_index, "a", e.token_ids, finish_reason=e.finish_reason) for e in events
        ]
        started: Any = SimpleNamespace(stream=SimpleNamespace(delivered=chunks), metrics=metrics)
        streams.prompts.append(started)
    replayed = [
        (choice, chunk.token_ids, chunk.finish_reason)
        for choice, chunk in delivered_chunks(generation, relayed)
    ]
    assert replayed == [(each.choice, each.token_ids, each.finish_reason) for each in written]
    assert generation.usage.completion_tokens == len(written)
    assert [sorted(each.choices) for each in finished] == [list(range(n))] * num_prompts

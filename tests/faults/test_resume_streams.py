"""kill -9 of the whole server under streams of every kind: a client that comes back gets the rest, frame for frame."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import httpx
import pytest
from tests.e2e.live import LiveServer
from tests.faults.processes import children, title_of, wait_for
from tests.gateway.asks import asks, by_choice
from tests.gateway.test_resume import groups

from quire.http.keys import ApiKey, create_key

KEY = "the-gateway's"
_ID = re.compile(rb"^id: (\S+):(\d+)\n", re.MULTILINE)
Ask = tuple[str, dict[str, Any]]


def command(folder: Path, *more: str) -> list[str]:
    journal = str(folder / "journal")
    return ["-m", "quire.cli", "serve", "quill", "--port", "0", "--threads", "1", "--tool-format", "hermes",
            "--journal", journal, "--gateway-key", KEY, *more]  # fmt: skip


async def read(url: str, ask: Ask, num_events: int, reached: asyncio.Barrier, dead: asyncio.Event) -> bytes:
    """Read some events of a stream, and keep the connection until the server is dead."""
    async with aiohttp.ClientSession() as session, session.post(url + ask[0], json=ask[1]) as response:
        assert response.status == 200, await response.text()
        seen = b""
        while seen.count(b"\n\n") < num_events and (more := await response.content.readany()):
            seen += more
        await reached.wait()
        await dead.wait()
    return b"".join(event + b"\n\n" for event in seen.split(b"\n\n")[:-1][:num_events])


async def under_streams(live: LiveServer, every: list[Ask], random: Random) -> list[bytes]:
    """Kill the server when each stream has some events; return what each client has."""
    reached, dead = asyncio.Barrier(len(every) + 1), asyncio.Event()
    tasks = [asyncio.create_task(read(live.url, ask, random.randint(1, 8), reached, dead)) for ask in every]
    waiting = asyncio.create_task(reached.wait())
    done, _ = await asyncio.wait([waiting, *tasks], return_when=asyncio.FIRST_COMPLETED)
    assert waiting in done, done
    live.process.send_signal(signal.SIGKILL)
    dead.set()
    return await asyncio.gather(*tasks)


def place_of(seen: bytes) -> tuple[str, int]:
    stream, number = _ID.findall(seen)[-1]
    return stream.decode(), int(number)


def undisturbed(client: httpx.Client, ask: Ask, answer: str) -> dict[int, list[bytes]]:
    """The stream of the same request under the same id, time and seed, from its first token to its last."""
    made = client.post(ask[0], json=ask[1], headers={"x-quire-gateway-key": KEY, "x-quire-answer": answer})
    return by_choice(b"".join(events for _, events in groups(made.content)))


def check_numbers(stream: bytes) -> None:
    numbers = [int(number) for _, number in _ID.findall(stream)]
    assert numbers == list(range(1, len(numbers) + 1))


def test_streams_outlive_kill_9_of_the_server(tmp_path: Path) -> None:
    random = Random(3)
    every = [ask for ask in asks(60) if not ask[0].startswith("/api/")][:48]  # NDJSON is not in the journal
    with LiveServer(command(tmp_path), tmp_path / "first.log") as first:
        left = [*children(first, "quire: engine"), *children(first, "quire: front")]
        seen = asyncio.run(under_streams(first, every, random))
        wait_for(lambda: not any(title_of(pid) for pid in left))
    heads = {}
    num_open = 0
    for path in (tmp_path / "journal").iterdir():
        lines = path.read_bytes().splitlines()
        heads[path.stem] = json.loads(lines[0])["answer"]
        num_open += b'"status"' not in lines[-1]
    assert num_open, "every stream had ended before the kill"
    with LiveServer(command(tmp_path), tmp_path / "second.log") as second:
        with httpx.Client(base_url=second.url, timeout=60) as client:
            for number, (ask, begun) in enumerate(zip(every, seen, strict=True)):
                stream_id, last = place_of(begun)
                came_back = {"last-event-id": f"{stream_id}:{last}"}
                if number % 2:
                    rest = client.post(ask[0], json=ask[1], headers=came_back)
                else:
                    rest = client.get(f"/v1/streams/{stream_id}", headers=came_back)
                assert rest.status_code == 200, rest.text
                check_numbers(begun + rest.content)
                whole = _ID.sub(b"", begun + rest.content)
                assert by_choice(whole) == undisturbed(client, ask, heads[stream_id]), (ask, last)
                again = client.get(
                    f"/v1/streams/{stream_id}"
                )  # it has ended, and can be had from its first event
                assert by_choice(_ID.sub(b"", again.content)) == by_choice(whole)
        assert second.metric("vllm:num_requests_running") == 0
        assert second.stop() == 0


@pytest.fixture(scope="module")
def tenants(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[LiveServer, dict[str, dict[str, str]]]]:
    folder = tmp_path_factory.mktemp("journal")
    keys = {}
    for name in ("alice", "bob"):
        key = create_key(folder / "keys", ApiKey(name, name, "", datetime.now(UTC)))
        keys[name] = {"authorization": f"Bearer {key}"}
    with LiveServer(command(folder, "--api-key-file", str(folder / "keys")), folder / "log") as live:
        yield live, keys


@pytest.mark.slow
def test_a_client_that_left_comes_back(tenants: tuple[LiveServer, dict[str, dict[str, str]]]) -> None:
    live, keys = tenants
    ask = (
        "/v1/completions",
        {"prompt": "Once", "max_tokens": 300, "ignore_eos": True, "stream": True, "seed": 3},
    )
    with httpx.Client(base_url=live.url, timeout=60, headers=keys["alice"]) as client:
        with client.stream("POST", ask[0], json=ask[1]) as response:
            pieces = response.iter_raw()
            begun = next(pieces)
        begun = b"".join(event + b"\n\n" for event in begun.split(b"\n\n")[:-1])
        stream_id, last = place_of(begun)
        rest = client.get(f"/v1/streams/{stream_id}", headers={"last-event-id": str(last)})
        check_numbers(begun + rest.content)
        assert rest.content.count(b"\n\n") + begun.count(b"\n\n") >= 300
        other = client.get(f"/v1/streams/{stream_id}", headers={"last-event-id": str(last), **keys["bob"]})
        assert (other.status_code, other.json()["error"]["code"]) == (404, "stream_not_found")
        unknown = client.get("/v1/streams/cmpl-" + "0" * 32)
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "stream_not_found")
        wrong = client.post(
            ask[0], json={**ask[1], "seed": 4}, headers={"last-event-id": f"{stream_id}:{last}"}
        )
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "another_request")
        far = client.get(f"/v1/streams/{stream_id}", headers={"last-event-id": "9999"})
        assert (far.status_code, far.json()["error"]["code"]) == (400, "invalid_event_id")
        whole = client.post(ask[0], json={**ask[1], "stream": False})
        assert (
            "".join(
                json.loads(line[6:])["choices"][0]["text"]
                for line in (begun + rest.content).decode().splitlines()
                if line.startswith("data: {")
            )
            == whole.json()["choices"][0]["text"]
        )

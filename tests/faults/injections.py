"""The faults, one function each: it injects a fault once into a `World` under load, and takes it away again.

A function returns the time from which on the server should serve again, and asserts what the server owes beside its
streams, for example the status of an answer. What it measures goes to the world's notes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.faults.processes import children, engine_of, title_of
from tests.faults.world import HANG_TIMEOUT_S, PATIENCE_S, TINY, World

Inject = Callable[[World], Awaitable[float]]
# What a look at /readyz may take itself: on a machine of its own, and on one that others load.
LOOK_S, LATE_S = 0.25, 1.5
OBJECT = {"type": "object"}


async def until(condition: Callable[[], bool], seconds: float) -> None:
    limit_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit_s, "it did not happen in time"
        await asyncio.sleep(0.01)


async def kill_engine(world: World) -> float:
    """SIGKILL to the engine."""
    os.kill(engine_of(world.server), signal.SIGKILL)
    return time.monotonic()


async def kill_engine_twice(world: World) -> float:
    """SIGKILL, and again as soon as the next engine has taken up the streams: then each has to run alone first."""
    os.kill(engine_of(world.server), signal.SIGKILL)
    log, before = world.server.log, world.server.log.read_text().count("engine_restarted")
    await until(lambda: log.read_text().count("engine_restarted") > before, PATIENCE_S)
    os.kill(engine_of(world.server), signal.SIGKILL)
    return time.monotonic()


async def stop_engine(world: World) -> float:
    """SIGSTOP to the engine until /readyz says so, within twice the predicted step and a second."""
    engine = engine_of(world.server)
    os.kill(engine, signal.SIGSTOP)
    begin_s = time.monotonic()
    try:
        while (answer := await world.call("GET", "/readyz")).status_code == 200:
            assert time.monotonic() - begin_s < PATIENCE_S, "the hang was not noticed"
            await asyncio.sleep(0.005)
        took_s = time.monotonic() - begin_s
    finally:
        os.kill(engine, signal.SIGCONT)
    reason = answer.json()["reason"]
    predicted_s = float(reason.partition("expected to take ")[2].split()[0])
    world.note("noticed, s", took_s)
    late_s = took_s - 2 * predicted_s - 1.0
    world.note("noticed beyond 2 x the predicted step and 1 s, s", late_s)
    world.note(f"of these within {LOOK_S} s (1: yes)", float(late_s <= LOOK_S))
    assert late_s <= LATE_S, reason
    return time.monotonic()


async def stop_engine_for_good(world: World) -> float:
    """SIGSTOP to the engine: after the hang timeout it is replaced."""
    engine = engine_of(world.server)
    os.kill(engine, signal.SIGSTOP)
    begin_s = time.monotonic()
    await until(lambda: title_of(engine) != "quire: engine", PATIENCE_S)
    world.note("replaced after, s", time.monotonic() - begin_s)
    return time.monotonic()


async def stop_api(world: World) -> float:
    """SIGSTOP to the API process for two seconds: the process in front answers probes."""
    os.kill(world.server.process.pid, signal.SIGSTOP)
    await asyncio.sleep(2.0)
    os.kill(world.server.process.pid, signal.SIGCONT)
    return time.monotonic()


async def sleep_laptop(world: World) -> float:
    """SIGSTOP to the API process and the engine for longer than the hang timeout: the engine is not replaced."""
    pids = world.server.process.pid, engine_of(world.server)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(HANG_TIMEOUT_S + 1.0)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    woken_s = time.monotonic()
    await asyncio.sleep(0.5)
    assert title_of(pids[1]) == "quire: engine"
    return woken_s


def _new_grammar(world: World) -> dict[str, object]:
    """A request whose grammar no helper has seen."""
    choice = [f"{world.rng.random()}", "b"]
    return {"prompt": "x", "max_tokens": 1, "structured_outputs": {"choice": choice}}


async def stop_helper(world: World) -> float:
    """SIGSTOP to the helpers for a second: a new grammar waits, and is answered."""
    assert (await world.call("POST", "/v1/completions", json=_new_grammar(world))).status_code == 200
    helpers = children(world.server, "quire: helper")
    assert helpers
    for helper in helpers:
        os.kill(helper, signal.SIGSTOP)
    asked = asyncio.ensure_future(world.call("POST", "/v1/completions", json=_new_grammar(world)))
    await asyncio.sleep(1.0)
    for helper in helpers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(helper, signal.SIGCONT)
    assert (await asked).status_code == 200
    return time.monotonic()


async def kill_helper(world: World) -> float:
    """SIGKILL to the helpers, at times while one has a grammar: that is a 400 at most, and the next one is served."""
    assert (await world.call("POST", "/v1/completions", json=_new_grammar(world))).status_code == 200
    slow = {"type": "object", "properties": {f"k{i}": {"pattern": f"[a-z]{{1,99}}{i}"} for i in range(200)}}
    body = {
        "prompt": "x",
        "max_tokens": 1,
        "structured_outputs": {"json": slow | {"title": str(world.rng.random())}},
    }
    asked = asyncio.ensure_future(world.call("POST", "/v1/completions", json=body))
    await asyncio.sleep(world.rng.uniform(0.0, 0.1))
    for helper in children(world.server, "quire: helper"):
        os.kill(helper, signal.SIGKILL)
    begin_s = time.monotonic()
    assert (await asked).status_code in (200, 400)
    assert (await world.call("POST", "/v1/completions", json=_new_grammar(world))).status_code == 200
    return begin_s


async def kill_front(world: World) -> float:
    """SIGKILL to the process in front: the server accepts connections and answers probes itself."""
    (front,) = children(world.server, "quire: front")
    os.kill(front, signal.SIGKILL)
    return time.monotonic()


async def fill_batches(world: World) -> float:
    """A full disk under --batch-dir: an upload is 507, and fine once there is room."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {**TINY, "model": "quill"}}
    content = "\n".join(json.dumps({**line, "custom_id": f"c{i}"}) for i in range(20)).encode()
    files = {"file": ("a.jsonl", content), "purpose": (None, "batch")}
    with _full(world.mount):
        assert (await world.call("POST", "/v1/files", files=files)).status_code == 507
    begin_s = time.monotonic()
    answer = await world.call("POST", "/v1/files", files=files)
    assert answer.status_code == 200, answer.text
    await world.call("DELETE", f"/v1/files/{answer.json()['id']}")
    return begin_s


@contextlib.contextmanager
def _full(folder: Path):  # type: ignore[no-untyped-def]
    """Fill a small file system to the last byte while the block runs."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for size in (4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)
    try:
        yield
    finally:
        ballast.unlink()


async def fill_place(world: World) -> float:
    """Its file system (/dev/shm, or the folder of temporary files) is full while the engine is killed, for a second."""
    with _full(world.mount):
        os.kill(engine_of(world.server), signal.SIGKILL)
        await asyncio.sleep(1.0)
    return time.monotonic()


async def jump_clock(world: World) -> float:
    """The wall clock jumps by up to a month, both ways, and back."""
    for shift in (world.rng.randrange(-(30 * 86400), 30 * 86400), 0):
        with world.clock.open("r+b", buffering=0) as file:  # the same file: the server has mapped it
            file.write(struct.pack("l", shift))
        answer = await world.call("POST", "/v1/chat/completions", json={
            "messages": [{"role": "user", "content": "x"}], "max_tokens": 1})  # fmt: skip
        assert abs(answer.json()["created"] - time.time() - shift) < 60, "the shift had no effect"
        assert (
            await world.call("POST", "/v1/completions", json={**TINY, "deadline_ms": 30_000})
        ).status_code == 200
    return time.monotonic()

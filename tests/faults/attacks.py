"""Faults that clients inject: connections held, halved and dropped, and hostile bodies, grammars, templates, weights.

Each is a function as of `tests.faults.injections`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from tests.engine.test_prompts import DOUBLING, ENDS, LOOPS
from tests.faults.hostile import ATTACKS
from tests.faults.junk import corrupt
from tests.faults.probe import send_raw
from tests.faults.world import TINY, World


def connect(world: World, body: dict[str, object] | None = None) -> socket.socket:
    """Open a connection, and send a request over it if there is a body."""
    parts = urlsplit(world.url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(30)
    sock.connect((parts.hostname, parts.port))
    if body is not None:
        raw = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        sock.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(raw) + raw)
    return sock


LONG = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 5}


async def slow_readers(world: World) -> float:
    """Eight clients ask for long streams and read nothing, eight a byte now and then; after 1.5 s they leave."""
    socks = [connect(world, LONG) for _ in range(16)]
    for _ in range(15):
        await asyncio.sleep(0.1)
        for sock in socks[8:]:
            await asyncio.to_thread(sock.recv, 1)
    for sock in socks:
        sock.close()
    return time.monotonic()


async def half_close(world: World) -> float:
    """Sixteen clients send a request and close their half: each gets its answer, or its request is aborted."""
    socks = [connect(world, {**LONG, "max_tokens": 20}) for _ in range(16)]
    for sock in socks:
        sock.shutdown(socket.SHUT_WR)
    for sock in socks:
        with contextlib.suppress(ConnectionResetError):
            while await asyncio.to_thread(sock.recv, 65536):
                continue
        sock.close()
    return time.monotonic()


async def vanish(world: World) -> float:
    """Thirty-two clients reset their connections: before the body, within it, or within the answer."""
    for _ in range(32):
        sock = connect(world, LONG if world.rng.random() < 0.7 else None)
        if world.rng.random() < 0.3:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
        await asyncio.sleep(world.rng.uniform(0.0, 0.03))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    return time.monotonic()


async def no_free_files(world: World) -> float:
    """EMFILE: the API process may open no further file for a second, while 40 clients try to connect."""
    pid = world.server.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used, before[1]))
    socks = [connect(world) for _ in range(40)]
    await asyncio.sleep(1.0)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    for sock in socks:
        sock.close()
    return time.monotonic()


async def hostile_body(world: World) -> float:
    """One of the bodies of up to 32 MB that once held the process."""
    path, media_type, body = ATTACKS[world.rng.choice(sorted(ATTACKS))]()
    status, _ = await asyncio.to_thread(send_raw, world.url, path, body, media_type=media_type)
    assert status in (200, 400, 413)
    return time.monotonic()


SCHEMAS: list[Callable[[int], dict[str, object]]] = [
    lambda i: {"json": {"properties": {f"k{j}": {"pattern": f"(a|b|ab){{1,300}}c{i}"} for j in range(99)}}},
    lambda i: {"regex": "(" * 20_000 + str(i) + ")" * 20_000},
    lambda i: {"grammar": "start: " + "(" * 5000 + f'"{i}"' + ")" * 5000},
    lambda i: {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}, "title": str(i)}},
    lambda i: {"json": json.loads('{"items":' * 100 + "{}" + "}" * 100) | {"title": str(i)}},
    lambda i: {"regex": f"([a-z]{{1,1000}}){{1,1000}}{i}"},
    lambda i: {"choice": [f"{i}{'a' * 500}{j}" for j in range(2000)]},
]  # fmt: skip


async def hostile_schema(world: World) -> float:
    """A grammar built to harm its compiler: a 400, or an answer."""
    form = world.rng.choice(SCHEMAS)(world.rng.randrange(10**9))
    answer = await world.call("POST", "/v1/completions", json={**TINY, "structured_outputs": form})
    assert answer.status_code in (200, 400), answer.text
    return time.monotonic()


# One template, whose branch the first message chooses; any other conversation is rendered as usual.
TEMPLATES = {
    "loops": LOOPS + ENDS,
    "prints": LOOPS + "{{ a }}" + ENDS,
    "doubles": DOUBLING.replace("DOUBLED", "ns.x + ns.x"),
    "recurses": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "multiplies": "{{ 'a' * 10000000000 }}",
    "power": "{{ 10 ** 10000000 }}",
    "joins": "{{ ([('a' * 9999)] * 9999) | join }}",
}
HOSTILE_TEMPLATE = (
    "{{- bos_token }}"
    + "".join(
        f"{{% {'elif' if i else 'if'} messages[0].content == '{name}' %}}{source}"
        for i, (name, source) in enumerate(TEMPLATES.items())
    )
    + "{% else %}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|assistant|>{% endif %}"
)


async def hostile_template(world: World) -> float:
    """A chat whose template does not end, or fills the memory: a 400."""
    turn = {"role": "user", "content": world.rng.choice(sorted(TEMPLATES))}
    answer = await world.call("POST", "/v1/chat/completions", json={"messages": [turn], "max_tokens": 1})
    assert answer.status_code == 400, answer.text
    return time.monotonic()


async def damaged_adapter(world: World) -> float:
    """Adapters with damaged files are loaded at run time: each is a 400, or loads."""
    for _ in range(10):
        name = f"bad{world.rng.randrange(10**9)}"
        folder = world.folder / name
        folder.mkdir()
        for file in sorted(Path(world.adapter.path).iterdir()):
            raw = file.read_bytes()
            (folder / file.name).write_bytes(corrupt(raw[:4000], world.rng) + raw[4000:])
        answer = await world.call(
            "POST", world.server.admin_url + "/lora", json={"lora_name": name, "lora_path": str(folder)}
        )
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 200:
            body = {**TINY, "model": name}
            assert (await world.call("POST", "/v1/completions", json=body)).status_code in (200, 500)
            await world.call("DELETE", f"{world.server.admin_url}/lora/{name}")
    return time.monotonic()


async def nan_weights(world: World) -> float:
    """Requests for an adapter whose weights are NaN: each fails alone, and says why."""
    admin, name = world.server.admin_url, f"poison{world.rng.randrange(10**9)}"
    loaded = await world.call(
        "POST", admin + "/lora", json={"lora_name": name, "lora_path": str(world.poison())}
    )
    assert loaded.status_code == 200, loaded.text
    for _ in range(4):
        answer = await world.call("POST", "/v1/completions", json={**TINY, "model": name})
        assert answer.status_code == 500, answer.text
        assert "not finite" in answer.text
    await world.call("DELETE", f"{admin}/lora/{name}")
    return time.monotonic()

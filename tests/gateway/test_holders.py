"""A request that goes on with a stored response reaches the backend that holds it, at any gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.live import (
    Live,
    Received,
    Scripted,
    answer,
    backends,
    begin_stream,
    chunk,
    frame,
    gateway_of,
)
from tests.gateway.test_ownership import ask, make_keys, owner_of

PATH = "/v1/responses"


class Store:
    """A backend that stores responses; ``has_get``: it shows them, too."""

    def __init__(self, name: str, *, has_get: bool = True) -> None:
        self.name = name
        self.ids: list[str] = []
        self.has_get = has_get
        self.server = Scripted(self._answer)

    def received(self, method: str = "POST") -> list[Received]:
        return [request for request in self.server.received if request.method == method]

    async def _answer(self, request: Received, writer: asyncio.StreamWriter) -> None:
        path = request.path.partition("?")[0]
        if request.method == "POST" and path in (PATH, f"{PATH}/input_tokens"):
            await self._made(request, writer)
            return
        response_id = path.removeprefix(PATH + "/").partition("/")[0]
        if response_id not in self.ids or not (self.has_get or request.method == "POST"):
            await answer(writer, 404, b'{"error":{"message":"not stored"}}')
            return
        if request.method == "DELETE":
            self.ids.remove(response_id)
        body = {"id": response_id, "held_by": self.name, "output": [{"id": f"msg_{response_id}"}]}
        await answer(writer, 200, json.dumps(body).encode())

    async def _made(self, request: Received, writer: asyncio.StreamWriter) -> None:
        previous = request.body.get("previous_response_id")
        items = request.body.get("input", "hi")
        named = [i["id"].removeprefix("msg_") for i in items] if isinstance(items, list) else []
        if not {*([previous] if previous else []), *named} <= {*self.ids}:
            error = {"message": "not stored", "code": "previous_response_not_found"}
            await answer(writer, 400, json.dumps({"error": error}).encode())
            return
        response_id = f"resp_{self.name}{len(self.ids)}"
        self.ids.append(response_id)
        value = {"id": response_id, "output": [{"id": f"msg_{response_id}"}]}
        value |= {"previous_response_id": previous, "usage": {"input_tokens": 1, "output_tokens": 1}}
        if not request.body.get("stream"):
            await answer(writer, 200, json.dumps(value).encode())
            return
        await begin_stream(writer)
        for kind in ("response.created", "response.completed"):
            await chunk(writer, frame({"type": kind, "response": value}))
        await chunk(writer, b"")


@asynccontextmanager
async def fresh(folder: Path, *stores: Store, **settings: Any) -> AsyncGenerator[Live, None]:
    """A gateway that has just started; with the key file of ``folder``, if it has one."""
    named = [{"name": each.name, "url": each.server.url} for each in stores]
    config = {"backends": named, "health": {"interval_s": 0.05, "slow_start_s": 0.0}}
    config |= {"routing": {"policy": "round-robin"}} | settings
    if (folder / "keys").exists():
        config["key_file"] = str(folder / "keys")
    async with gateway_of(config) as live:
        yield live


async def respond(live: Live, key: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    status, raw = await live.post({"model": "m", "input": "hi"} | fields, PATH, authorization=key)
    if fields.get("stream"):
        raw = raw.splitlines()[0].removeprefix(b"data: ")
        return status, json.loads(raw)["response"]
    return status, json.loads(raw)


async def made_at_each(folder: Path, key: str, *stores: Store) -> dict[str, dict[str, Any]]:
    """Have one response made at each backend, by a gateway that ends; half of them streamed."""
    made: dict[str, dict[str, Any]] = {}
    async with fresh(folder, *stores) as live:
        for i in range(len(stores)):
            status, response = await respond(live, key, stream=i % 2 == 1)
            assert status == 200
            made[response["id"].partition("-")[0][5:-1]] = response
    assert made.keys() == {each.name for each in stores}
    for each in stores:
        each.server.received.clear()
    return made


@pytest.mark.parametrize("tenants", [2, 0])
def test_other_gateways_find_the_backend_of_a_response(tenants: int, tmp_path: Path) -> None:
    """With hints in the ids of two tenants; and without, by asking all. Each gateway is used for one request."""
    keys = make_keys(tmp_path, *("lab", "shop")[:tenants])
    key = keys.get("lab", "")

    async def run() -> None:
        one, two = Store("one"), Store("two")
        async with backends(one.server, two.server):
            made = await made_at_each(tmp_path, key, one, two)
            for store, other in ((one, two), (two, one)):
                shown = made[store.name]["id"]
                for stream in (False, True):
                    async with fresh(tmp_path, one, two) as live:
                        status, follow = await respond(live, key, previous_response_id=shown, stream=stream)
                        assert (status, follow["previous_response_id"]) == (200, shown)
                        status, follow = await respond(live, key, previous_response_id=follow["id"])
                        assert status == 200
                for method, end in (
                    ("GET", ""),
                    ("GET", "/input_items"),
                    ("POST", "/cancel"),
                    ("DELETE", ""),
                ):
                    async with fresh(tmp_path, one, two) as live:
                        status, body = await ask(live, key, method, f"{PATH}/{shown}{end}")
                        assert (status, body["held_by"]) == (200, store.name)
                        assert body["id"] == shown
                        assert body["output"][0]["id"] == made[store.name]["output"][0]["id"]
                        if end != "/cancel" and method == "GET":
                            assert not tenants or not other.server.received, "the hint names the backend"
                for each in (one, two):
                    each.server.received.clear()

    asyncio.run(run())


def test_a_response_that_is_gone_is_a_400(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, "lab", "shop")

    async def run() -> None:
        one, two = Store("one"), Store("two")
        async with backends(one.server, two.server):
            made = await made_at_each(tmp_path, keys["lab"], one, two)
            one.ids.clear()  # it was started again
            async with fresh(tmp_path, one, two) as live:
                status, body = await respond(
                    live, keys["lab"], previous_response_id=made["one"]["id"], input="and?"
                )
                assert (status, body["error"]["code"]) == (400, "previous_response_not_found")
                assert (await ask(live, keys["lab"], "GET", f"{PATH}/{made['one']['id']}"))[0] == 404

    asyncio.run(run())


def test_an_id_without_a_hint_is_still_taken(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, "lab", "shop")

    async def run() -> None:
        one, two = Store("one"), Store("two")
        lab = owner_of(tmp_path, "lab")
        async with backends(one.server, two.server):
            await made_at_each(tmp_path, keys["lab"], one, two)
            for store in (one, two):
                given = store.ids[0]
                tag = blake2b(f"lab\0{given}".encode(), key=lab.key, digest_size=12).hexdigest()
                async with fresh(tmp_path, one, two) as live:
                    shown = f"{given}-{tag}"
                    status, follow = await respond(live, keys["lab"], previous_response_id=shown)
                    assert (status, follow["previous_response_id"]) == (200, shown)
                    assert follow["id"] == lab.seal(store.ids[-1], lab.hint_of(store.name))
                    assert (await ask(live, keys["lab"], "GET", f"{PATH}/{shown}"))[1]["id"] == shown
                    status, _ = await respond(live, keys["shop"], previous_response_id=shown)
                    assert status == 400

    asyncio.run(run())


def test_a_stream_continued_elsewhere_is_found_there(tmp_path: Path) -> None:
    """Its ids have the hint of the backend that began it."""
    keys = make_keys(tmp_path, "lab", "shop")

    async def run() -> None:
        one, two = Store("one"), Store("two")
        async with backends(one.server, two.server):
            made = await made_at_each(tmp_path, keys["lab"], one, two)
            two.ids.append(one.ids.pop())
            async with fresh(tmp_path, one, two) as live:
                status, _ = await respond(live, keys["lab"], previous_response_id=made["one"]["id"])
                assert status == 200
            async with fresh(tmp_path, one, two) as live:
                status, body = await ask(live, keys["lab"], "GET", f"{PATH}/{made['one']['id']}")
                assert (status, body["held_by"]) == (200, "two")

    asyncio.run(run())


def test_a_backend_that_shows_nothing_is_found_by_the_hint(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, "lab", "shop")

    async def run() -> None:
        one, two = Store("one", has_get=False), Store("two", has_get=False)
        async with backends(one.server, two.server):
            made = await made_at_each(tmp_path, keys["lab"], one, two)
        before = one.server.url, two.server.url
        async with backends(one.server, two.server):  # started again at other addresses, by the same names
            assert not {*before} & {one.server.url, two.server.url}
            for store in (one, two):
                async with fresh(tmp_path, one, two) as live:
                    shown = made[store.name]
                    status, _ = await respond(live, keys["lab"], previous_response_id=shown["id"])
                    assert status == 200
                    item = {"type": "item_reference", "id": shown["output"][0]["id"]}
                    status, _ = await respond(live, keys["lab"], input=[item])
                    assert status == 200

    asyncio.run(run())


@pytest.mark.parametrize("restarted", [False, True])
def test_a_response_at_a_silent_backend_is_not_said_to_be_lost(restarted: bool, tmp_path: Path) -> None:
    keys = make_keys(tmp_path, "lab", "shop")

    async def run() -> None:
        one, two = Store("one"), Store("two")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(backends(one.server, two.server))
            live = await stack.enter_async_context(fresh(tmp_path, one, two))
            made = [(await respond(live, keys["lab"]))[1]["id"] for _ in range(2)]
            if restarted:
                live = await stack.enter_async_context(fresh(tmp_path, one, two))
            one.server.ready = False
            await live.until(lambda: sum(b.is_ready for b in live.state.fleet) == 1)
            shown = next(each for each in made if each.startswith("resp_one"))
            status, body = await respond(live, keys["lab"], previous_response_id=shown)
            assert (status, body["error"]["code"]) == (503, "no_backend")
            assert "holds the response" in body["error"]["message"]
            assert live.headers["retry-after"] == "1"
            status, body = await ask(live, keys["lab"], "GET", f"{PATH}/{shown}")
            assert (status, body["error"]["code"]) == (503, "no_backend")
            assert not [r for r in two.received() if r.body.get("previous_response_id")]
            one.server.ready = True
            await live.until(lambda: all(b.is_ready for b in live.state.fleet))
            assert (await respond(live, keys["lab"], previous_response_id=shown))[0] == 200

    asyncio.run(run())


def test_a_hint_tells_no_name_and_cannot_be_changed(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make_keys(tmp_path / name, "lab", "shop")
    lab, other = owner_of(tmp_path / "a", "lab"), owner_of(tmp_path / "b", "lab")
    hints = [lab.hint_of(name) for name in ("one", "two", "", "é")]
    assert len({*hints, other.hint_of("one")}) == 5
    shown = lab.seal("resp_1", hints[0])
    assert (lab.open(shown), lab.hint_in(shown)) == ("resp_1", hints[0])
    assert len(shown) == len(lab.seal("resp_1"))
    forged = shown.replace(hints[0], hints[1])
    assert (lab.open(forged), lab.hint_in(forged)) == (None, "")
    assert (lab.open(lab.seal("resp_1")), lab.hint_in(lab.seal("resp_1"))) == ("resp_1", "")
    shop = owner_of(tmp_path / "a", "shop")
    assert (shop.open(shown), shop.hint_in(shown), other.open(shown)) == (None, "", None)

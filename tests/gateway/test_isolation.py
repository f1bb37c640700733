"""The table of isolation: every endpoint with an id, for its tenant, another one, and nobody, in each arrangement.

The rows are by route. The routes come from the applications themselves: an endpoint with an id that has no row fails.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp
from tests.api.asgi_client import app_with_jobs
from tests.api.fake_frontend import FakeFrontend
from tests.e2e.live import LiveServer
from tests.http.serving import served

from quire.engine.prompts import NOT_BEGUN, Begun
from quire.engine.stream import RequestStream
from quire.errors import ModelLoadError
from quire.http.call import Call
from quire.http.keys import ApiKey, KeyFile, create_key
from quire.jobs.runner import call_for, owner_of
from quire.models.hub import quill_path
from quire_gateway.admin import admin_app
from quire_gateway.app import create_gateway
from quire_gateway.build import make_state
from quire_gateway.cli.gateway import batches
from quire_gateway.config_file import gateway_config
from quire_gateway.state import GatewayState

GATEWAY_KEY = "the-gateways-own-key"
WAIT_S = 60.0
UNKNOWN = {
    "response": "resp_" + "0" * 32,
    "stream": "chatcmpl-" + "0" * 32,
    "file": "file-" + "0" * 32,
    "batch": "batch_" + "0" * 32,
    "messages": "msgbatch_" + "0" * 32,
}


class Replaying(FakeFrontend):
    """Goes on with a stream by running it again: the journal leaves out the events that the client has."""

    async def submit(self, *args: Any, begun: Begun = NOT_BEGUN, **kwargs: Any) -> RequestStream:
        return await super().submit(*args, begun=begun._replace(delivered=()), **kwargs)


class Row(NamedTuple):
    """An endpoint with an id. ``kind``: what the id is of; ``own``: statuses that the tenant itself may get."""

    kind: str
    own: tuple[int, ...] = (200,)


# (path, method) → what is promised. Another tenant gets 404, as for an id that does not exist; without a key it is 401.
TABLE = {
    ("/v1/responses/{response_id}", "GET"): Row("response"),
    ("/v1/responses/{response_id}/input_items", "GET"): Row("response"),
    ("/v1/responses/{response_id}/cancel", "POST"): Row("response", (200, 400)),  # 400: it had ended
    ("/v1/responses/{response_id}", "DELETE"): Row("response"),
    ("/v1/streams/{stream_id}", "GET"): Row("stream"),
    ("/v1/files/{file_id}", "GET"): Row("file"),
    ("/v1/files/{file_id}/content", "GET"): Row("file"),
    ("/v1/files/{file_id}", "DELETE"): Row("file", (200, 400)),  # 400: a batch reads it
    ("/v1/batches/{batch_id}", "GET"): Row("batch"),
    ("/v1/batches/{batch_id}/cancel", "POST"): Row("batch", (200, 400)),
    ("/v1/messages/batches/{batch_id}", "GET"): Row("messages"),
    ("/v1/messages/batches/{batch_id}/results", "GET"): Row("messages"),
    ("/v1/messages/batches/{batch_id}/cancel", "POST"): Row("messages"),
}
# Of no tenant: models are shared, and blobs are refused to all.
SHARED = {"/v1/models/{model_id:path}", "/api/blobs/{digest}"}
# For who has the admin key: no key of a tenant opens them, or those that load models.
ADMIN = "/admin/"


class Answer(NamedTuple):
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class World:
    """Servers with two tenants, and who asks them. ``urls``: the same promise holds at each."""

    urls: list[str]
    session: aiohttp.ClientSession
    keys: dict[str, str]
    has_streams: bool
    frontend: FakeFrontend
    apps: list[ASGIApp]
    # Starts one more gateway, which knows of the first what one that starts again does. Of servers there is one.
    another: Callable[[], Awaitable[None]] = field(init=False)

    async def ask(self, who: str, method: str, path: str, url: str = "", **kwargs: Any) -> Answer:
        headers = dict(kwargs.pop("headers", {}))
        if who in self.keys:
            headers["authorization"] = f"Bearer {self.keys[who]}"
        at = (url or self.urls[0]) + path
        async with self.session.request(method, at, headers=headers, **kwargs) as response:
            return Answer(response.status, await response.read())

    async def until(self, who: str, path: str, field: str, values: tuple[str, ...]) -> Any:
        end_s = time.monotonic() + WAIT_S
        while (found := (await self.ask(who, "GET", path)).json).get(field) not in values:
            assert time.monotonic() < end_s, found
            await asyncio.sleep(0.01)
        return found

    async def make(self, who: str) -> dict[str, str]:
        """Have a tenant make one of each kind; return the ids."""
        body = {"model": "tiny", "input": "hi"}
        made = {"response": (await self.ask(who, "POST", "/v1/responses", json=body)).json["id"]}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", json.dumps(line).encode(), filename="lines.jsonl")
        made["file"] = (await self.ask(who, "POST", "/v1/files", data=form)).json["id"]
        begin = {
            "input_file_id": made["file"],
            "endpoint": "/v1/responses",
            "completion_window": "24h",
        }
        made["batch"] = (await self.ask(who, "POST", "/v1/batches", json=begin)).json["id"]
        params = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
        asked = {"requests": [{"custom_id": "a", "params": params}]}
        made["messages"] = (await self.ask(who, "POST", "/v1/messages/batches", json=asked)).json["id"]
        done = await self.until(who, f"/v1/batches/{made['batch']}", "status", ("completed",))
        made["output"] = done["output_file_id"]
        await self.until(who, f"/v1/messages/batches/{made['messages']}", "processing_status", ("ended",))
        chat = {"model": "tiny", "stream": True, "messages": params["messages"]}
        stream = await self.ask(who, "POST", "/v1/chat/completions", json=chat)
        made["stream"] = json.loads(stream.body.partition(b"data: ")[2].partition(b"\n")[0])["id"]
        return made


def make_keys(path: Path) -> dict[str, str]:
    now = datetime.now(UTC)
    return {
        name: create_key(path, ApiKey(name, tenant, "", created=now))
        for name, tenant in (("own", "lab"), ("mate", "lab"), ("other", "shop"))
    } | {"static": "sk-static"}


ARRANGEMENTS = ("serve", "serve with a journal", "gateway", "gateway with a key")


@asynccontextmanager
async def world(how: str, folder: Path) -> AsyncGenerator[World, None]:
    """Run an arrangement. Behind a gateway the replica has no key file, as the documented example."""
    keys, frontend = make_keys(folder / "keys"), Replaying(step_s=0.0)
    settings: dict[str, Any] = {}
    if how.startswith("serve"):
        settings |= {
            "key_file": KeyFile(folder / "keys", time.monotonic),
            "api_keys": ("sk-static",),
            "batch_dir": str(folder / "batches"),
        }
    if how != "serve":
        settings |= {"journal_dir": folder / "journal", "journal_bytes": 1 << 20}
    if how == "gateway with a key":
        settings |= {"gateway_key": GATEWAY_KEY}
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        app: ASGIApp = app_with_jobs(frontend, **settings)
        url = await stack.enter_async_context(served(app))
        made = World([url], session, keys, how == "serve with a journal", frontend, [app])

        async def another() -> None:
            if not how.startswith("gateway"):
                return
            state = gateway_state(folder, url, how)
            made.apps.append(create_gateway(state, batches(state)))
            made.urls.append(await stack.enter_async_context(served(made.apps[-1])))
            end_s = time.monotonic() + WAIT_S
            while not all(b.is_ready for b in state.fleet) or not list(state.fleet):
                assert time.monotonic() < end_s
                await asyncio.sleep(0.005)

        made.another = another
        if how.startswith("gateway"):
            made.urls, made.apps = [], []
            await another()
        yield made


def gateway_state(folder: Path, url: str, how: str) -> GatewayState:
    """Each gateway is one of several, and one that starts again: nothing is kept between two but the key file."""
    config: dict[str, Any] = {
        "backends": [{"name": "b0", "url": url}],
        "health": {"interval_s": 0.05},
        "key_file": str(folder / "keys"),
        "api_keys": ["sk-static"],
        "batch_dir": str(folder / "gateway-batches"),
    }
    if how != "gateway":
        config["admin_key" if "admin" in how else "gateway_key"] = GATEWAY_KEY
    return make_state(gateway_config(config), time.monotonic, 0)


def routes_of(app: Any) -> set[tuple[str, str]]:
    """Return path and method of every route with a part that the client chooses."""
    while not isinstance(app, Starlette):
        app = getattr(app, "_app", None) or app.app
    found = set()
    for route in app.routes:
        assert isinstance(route, Route), route
        if "{" in route.path:
            found |= {(route.path, method) for method in (route.methods or {"any"}) - {"HEAD"}}
    return found


@pytest.mark.parametrize("how", ARRANGEMENTS)
def test_every_endpoint_with_an_id_keeps_tenants_apart(how: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with world(how, tmp_path) as there:
            routes = routes_of(there.apps[0])
            rows = {route for route in routes if route[0] not in SHARED}
            assert rows <= set(TABLE), f"no row in the table for {rows - set(TABLE)}"
            made, foreign = await there.make("own"), await there.make("other")
            assert all(made[kind] != foreign[kind] for kind in made)
            await there.another()
            for path, method in sorted(TABLE, key=lambda row: row[1] == "DELETE"):
                for url in there.urls:
                    await check(there, path, method, made, foreign, url, (path, method) in routes)

    asyncio.run(run())


async def check(
    there: World,
    path: str,
    method: str,
    made: dict[str, str],
    foreign: dict[str, str],
    url: str,
    is_served: bool,
) -> None:
    """Ask one endpoint for one id as everyone; the tenant itself is the last."""
    row = TABLE[path, method]
    is_gateways = row.kind in ("file", "batch", "messages") and len(there.urls) > 1

    def at(given: str) -> str:
        return path.partition("{")[0] + given + path.partition("}")[2]

    where = f"{method} {path}"
    shown = made[row.kind]
    for who in ("other", "static"):
        answer = await there.ask(who, method, at(shown), url)
        unknown = await there.ask(who, method, at(UNKNOWN[row.kind]), url)
        assert (answer.status, unknown.status) == (404, 404), (where, who, answer)
        if is_served:
            assert answer.body.replace(shown.encode(), b"ID") == unknown.body.replace(
                UNKNOWN[row.kind].encode(), b"ID"
            ), (where, "an id of another tenant is answered as one that does not exist")
    assert (await there.ask("none", method, at(shown), url)).status == 401, where
    assert (await there.ask("mate", method, at(foreign[row.kind]), url)).status == 404, where
    if not is_served or (row.kind == "stream" and not there.has_streams):
        assert (await there.ask("own", method, at(shown), url)).status == 404, where
        return
    if is_gateways and url != there.urls[0] and method != "GET":
        return  # the folder of batches is one gateway's
    if method == "DELETE" and row.kind == "response":
        if url != there.urls[-1]:
            return
        assert (await there.ask("own", "GET", at(shown), url)).status == 200, where
    answer = await there.ask("own", method, at(shown), url)
    assert answer.status in row.own, (where, answer)
    if method == "GET" and row.kind == "response":
        assert (await there.ask("mate", method, at(shown), url)).status == 200, where
    if method == "GET" and answer.body.startswith(b"{") and "/" not in path.partition("}")[2]:
        assert answer.json["id"] == shown, where


@pytest.mark.parametrize("how", ARRANGEMENTS)
def test_no_tenant_goes_on_with_what_another_has(how: str, tmp_path: Path) -> None:
    """Stored responses, their items, input files, and outputs of batches, at every server."""

    async def run() -> None:
        async with world(how, tmp_path) as there:
            made = await there.make("own")
            stored = (await there.ask("own", "GET", f"/v1/responses/{made['response']}")).json
            item = stored["output"][0]["id"]
            await there.another()
            for url in there.urls:
                follow = {"model": "tiny", "input": "and?", "previous_response_id": made["response"]}
                refer = {"model": "tiny", "input": [{"type": "item_reference", "id": item}]}
                for who in ("other", "static"):
                    answer = await there.ask(who, "POST", "/v1/responses", url, json=follow)
                    assert (answer.status, answer.json["error"]["code"]) == (
                        400,
                        "previous_response_not_found",
                    )
                    answer = await there.ask(who, "POST", "/v1/responses", url, json=refer)
                    assert answer.status == 400, answer
                    assert answer.json["error"]["param"] == "input[0]"
                    begin = {
                        "input_file_id": made["file"],
                        "endpoint": "/v1/responses",
                        "completion_window": "1h",
                    }
                    answer = await there.ask(who, "POST", "/v1/batches", url, json=begin)
                    assert answer.json["error"]["param"] == "input_file_id"
                    assert (
                        await there.ask(who, "GET", f"/v1/files/{made['output']}/content", url)
                    ).status == 404
                    for listed in ("/v1/files", "/v1/batches", "/v1/messages/batches"):
                        assert (await there.ask(who, "GET", listed, url)).json["data"] == []
                for who in ("own", "mate"):
                    answer = await there.ask(who, "POST", "/v1/responses", url, json=follow)
                    assert answer.status == 200, answer
                    assert answer.json["previous_response_id"] == made["response"]
                    assert (await there.ask(who, "POST", "/v1/responses", url, json=refer)).status == 200, how
            lines = (await there.ask("own", "GET", f"/v1/files/{made['output']}/content")).body.splitlines()
            answered = json.loads(lines[0])["response"]["body"]["id"]
            assert (await there.ask("own", "GET", f"/v1/responses/{answered}")).status == 200
            assert (await there.ask("other", "GET", f"/v1/responses/{answered}")).status == 404

    asyncio.run(run())


@pytest.mark.parametrize("how", ARRANGEMENTS)
def test_a_batch_goes_on_with_its_tenants_responses_alone(how: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with world(how, tmp_path) as there:
            made = await there.make("own")
            for who, fails in (("other", 1), ("own", 0)):
                batch = await begin_batch(there, who, "tiny", previous_response_id=made["response"])
                done = await there.until(who, f"/v1/batches/{batch}", "status", ("completed",))
                assert done["request_counts"]["failed"] == fails, who

    asyncio.run(run())


def test_a_batch_after_a_restart_is_still_its_tenants(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    settings: dict[str, Any] = {
        "key_file": KeyFile(tmp_path / "keys", time.monotonic),
        "batch_dir": str(tmp_path / "batches"),
    }

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            stuck = FakeFrontend(step_s=0.0)
            stuck.gate = asyncio.Event()
            async with served(app_with_jobs(stuck, **settings)) as url:
                batch = await begin_batch(World([url], session, keys, False, stuck, []), "own", "tiny")
            frontend = FakeFrontend(step_s=0.0)
            async with served(app_with_jobs(frontend, **settings)) as url:
                there = World([url], session, keys, False, frontend, [])
                done = await there.until("own", f"/v1/batches/{batch}", "status", ("completed",))
                assert not {"tenant", "cache_group", "key"} & done.keys()
                output = await there.ask("own", "GET", f"/v1/files/{done['output_file_id']}/content")
                response = json.loads(output.body)["response"]["body"]["id"]
                assert (await there.ask("mate", "GET", f"/v1/responses/{response}")).status == 200
                assert (await there.ask("other", "GET", f"/v1/responses/{response}")).status == 404
            assert frontend.submitted[0].kwargs["tenant"] == "lab"
            assert frontend.submitted[0].kwargs["cache_salt"] == "lab\n"

    asyncio.run(run())


async def begin_batch(there: World, who: str, model: str, **fields: Any) -> str:
    """Begin a batch of one response; return its id."""
    body = {"model": model, "input": "hi", **fields}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", json.dumps(line).encode(), filename="lines.jsonl")
    file = (await there.ask(who, "POST", "/v1/files", data=form)).json["id"]
    begin = {"input_file_id": file, "endpoint": "/v1/responses", "completion_window": "24h"}
    return str((await there.ask(who, "POST", "/v1/batches", json=begin)).json["id"])


def test_a_batch_has_the_rights_of_its_key_and_no_more(tmp_path: Path) -> None:
    """Also at a gateway that starts again: the models that the key may use."""

    async def run() -> None:
        async with world("gateway", tmp_path) as there:
            for name, models in (("small", ("other-*",)), ("big", ("ti*",))):
                key = ApiKey(name, "lab", "", created=datetime.now(UTC), models=models)
                there.keys[name] = create_key(tmp_path / "keys", key)
            await asyncio.sleep(1.1)  # the file is read again
            for who, failed in (("small", 1), ("big", 0)):
                batch = await begin_batch(there, who, "tiny")
                done = await there.until(who, f"/v1/batches/{batch}", "status", ("completed",))
                assert done["request_counts"]["failed"] == failed, who

        rights = {"name": "small", "models": ["o*"], "weight": 2.0}
        kept = json.loads(json.dumps({"tenant": "lab", "cache_group": "+pool", "key": rights}))
        call = call_for(kept)
        assert owner_of(call) == kept
        assert call.key is not None
        assert call.key.models == ("o*",)
        assert (call.tenant, call.salt_group, call.weight, call.is_local) == ("lab", "+pool", 2.0, True)
        assert call_for({}) == Call(is_local=True)

    asyncio.run(run())


@pytest.mark.parametrize("how", ["serve with a journal", "gateway", "gateway with a key"])
def test_a_background_response_is_its_tenants_while_it_runs(how: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with world(how, tmp_path) as there:
            there.frontend.gate = asyncio.Event()
            body = {"model": "tiny", "input": "hi", "background": True}
            begun = (await there.ask("own", "POST", "/v1/responses", json=body)).json
            path = f"/v1/responses/{begun['id']}"
            await there.another()
            for url in there.urls:
                for who, status in (("none", 401), ("other", 404), ("static", 404), ("own", 200)):
                    for end in ("", "/input_items"):
                        assert (await there.ask(who, "GET", path + end, url)).status == status, who
                    if who != "own":
                        assert (await there.ask(who, "POST", path + "/cancel", url)).status == status
                        assert (await there.ask(who, "DELETE", path, url)).status == status
            assert (await there.ask("own", "GET", path)).json["status"] in ("queued", "in_progress")
            there.frontend.gate.set()
            done = await there.until("own", path, "status", ("completed",))
            assert done["id"] == begun["id"]

    asyncio.run(run())


@pytest.mark.parametrize("how", ["gateway", "gateway with a key"])
def test_ids_of_a_stream_are_those_that_a_query_takes(how: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with world(how, tmp_path) as there:
            body = {"model": "tiny", "input": "hi", "stream": True}
            stream = (await there.ask("own", "POST", "/v1/responses", json=body)).body
            events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith(b"data: {")]
            ids = {event["response"]["id"] for event in events if "response" in event}
            assert len(ids) == 1
            stored = (await there.ask("own", "GET", f"/v1/responses/{ids.pop()}")).json
            items = {event["item_id"] for event in events if "item_id" in event}
            assert items == {item["id"] for item in stored["output"]}
            assert events[-1]["response"]["output"] == stored["output"]

    asyncio.run(run())


def test_the_admin_surface_takes_no_key_of_a_tenant(tmp_path: Path) -> None:
    async def run() -> None:
        async with world("gateway with an admin key", tmp_path) as there:
            routes = routes_of(admin_app(gateway_state(tmp_path, "http://127.0.0.1:9", "gateway")))
            assert routes, "there are some with an id"
            for path, method in sorted(routes):
                assert path.startswith(ADMIN)
                name = path.partition("{")[0] + "own" + path.partition("}")[2]
                for who in ("own", "other", "static", "none"):
                    assert (await there.ask(who, method, name)).status == 401, (path, method, who)

    asyncio.run(run())


def test_a_websocket_has_the_rights_of_its_key(tmp_path: Path) -> None:
    async def run() -> None:
        for how in ("serve", "gateway"):
            folder = tmp_path / how
            folder.mkdir()
            async with world(how, folder) as there:
                made = (
                    await there.ask("own", "POST", "/v1/responses", json={"model": "tiny", "input": "hi"})
                ).json
                body = {"model": "tiny", "input": "and?", "previous_response_id": made["id"]}
                for who, status in (("other", 400), ("static", 400), ("mate", 200)):
                    headers = {"authorization": f"Bearer {there.keys[who]}"}
                    async with there.session.ws_connect(there.urls[0] + "/v1/ws", headers=headers) as socket_:
                        await socket_.send_json({"id": "a", "path": "/v1/responses", "body": body})
                        assert (await socket_.receive_json())["status"] == status, (how, who)

    asyncio.run(run())


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, LiveServer, dict[str, str]]]:
    """A replica that knows no tenants but has a gateway's key, and a server with a key file; both with Quill."""
    try:
        quill_path("quill")
    except ModelLoadError as error:
        pytest.skip(str(error))
    folder, now = tmp_path_factory.mktemp("real"), datetime.now(UTC)
    keys = {
        name: create_key(folder / "keys", ApiKey(name, name, "", created=now, cache_group=group))
        for name, group in (("lab", ""), ("shop", ""), ("ann", "pool"), ("ben", "pool"))
    }
    command = ["-m", "quire.cli", "serve", "quill", "--port", "0", "--threads", "1"]
    with (
        LiveServer([*command, "--gateway-key", GATEWAY_KEY], folder / "replica.log") as replica,
        LiveServer([*command, "--api-key-file", str(folder / "keys")], folder / "server.log") as server,
    ):
        yield replica, server, keys | {"folder": str(folder)}


@pytest.mark.parametrize("how", ["serve", "gateway", "gateway with a key"])
def test_cached_tokens_tell_nothing_of_another_tenant(
    how: str, real: tuple[LiveServer, LiveServer, dict[str, str]]
) -> None:
    replica, server, keys = real
    folder = Path(keys["folder"])

    async def run() -> None:
        async with AsyncExitStack() as stack:
            url, session = server.url, await stack.enter_async_context(aiohttp.ClientSession())
            if how != "serve":
                state = gateway_state(folder, replica.url, how)
                url = await stack.enter_async_context(served(create_gateway(state, batches(state))))
                while not all(b.is_ready for b in state.fleet) or not list(state.fleet):
                    await asyncio.sleep(0.01)

            async def cached(who: str, salt: str = "") -> int:
                body = {
                    "model": "quill",
                    "prompt": f"{how}: " + "a text of many words. " * 40,
                    "max_tokens": 1,
                }
                body |= {"cache_salt": salt} if salt else {}
                headers = {"authorization": f"Bearer {keys[who]}"}
                async with session.post(url + "/v1/completions", json=body, headers=headers) as response:
                    return int((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])

            assert await cached("lab") == 0
            hit = await cached("lab")
            assert hit > 100
            for salt in ("", "lab", "lab\n"):
                assert await cached("shop", salt) == 0, "only lab has sent it"
            assert await cached("lab", "own") == 0, "a client's salt keeps its own requests apart"
            assert [await cached("lab"), await cached("shop"), await cached("lab", "own")] == [hit] * 3
            assert await cached("ann") == 0
            assert await cached("ben") == hit, "tenants of one cache group share"
            assert await cached("ben", "own") == 0
            assert await cached("ann", "own") == hit

    asyncio.run(run())

"""`ModelPool`: which model makes room, what is never unloaded, and what a request sees that waits for its model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.e2e.live import LiveServer
from tests.gateway.live import (
    Live,
    Received,
    Scripted,
    backends,
    begin_stream,
    chunk,
    frame,
    gateway_of,
    says,
)

from quire.args import ServerArgs
from quire.config import DeviceInfo
from quire.errors import ConfigError, ModelLoadError
from quire.http.refusals import HttpError
from quire_gateway.cli.serve_models import memory_shares, named_models, serve_models
from quire_gateway.discovery import Registration
from quire_gateway.model_pool import ModelPool, PooledModel

GIB = 2**30
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Loads:
    """Records what is loaded and unloaded; ``broken`` models cannot be, ``slow`` ones never are."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.broken: set[str] = set()
        self.slow: set[str] = set()

    async def load(self, name: str) -> None:
        self.events.append(f"+{name}")
        if name in self.slow:
            await asyncio.Event().wait()
        if name in self.broken:
            raise ModelLoadError("its weights are cut short")

    async def unload(self, name: str) -> None:
        self.events.append(f"-{name}")


def pool_of(loads: Loads, *models: PooledModel, memory: int = 2, timeout_s: float = 20.0) -> ModelPool:
    return ModelPool(models, memory, loads.load, loads.unload, time.monotonic, load_timeout_s=timeout_s)


async def used(pool: ModelPool, *names: str) -> None:
    for name in names:
        async with pool.use(name):
            pass


async def until(loads: Loads, event: str) -> None:
    async with asyncio.timeout(60):
        while event not in loads.events:
            await asyncio.sleep(0)


async def test_the_least_recently_used_model_makes_room() -> None:
    loads = Loads()
    pool = pool_of(loads, *(PooledModel(name, 1) for name in "abc"))
    await used(pool, "a", "b", "a", "c", "a", "b")
    assert loads.events == ["+a", "+b", "-b", "+c", "-c", "+b"]


async def test_a_pinned_model_is_loaded_at_the_start_and_stays() -> None:
    loads = Loads()
    pool = pool_of(loads, PooledModel("a", 1, is_pinned=True), PooledModel("b", 1), PooledModel("c", 1))
    pool.start()
    await until(loads, "+a")
    await used(pool, "b", "c", "b")
    assert loads.events == ["+a", "+b", "-b", "+c", "-c", "+b"]
    await pool.close()


async def test_requests_that_arrive_together_load_a_model_once() -> None:
    loads = Loads()
    pool = pool_of(loads, PooledModel("a", 1))
    await asyncio.gather(*(used(pool, "a") for _ in range(20)))
    assert loads.events == ["+a"]


async def test_a_model_in_use_is_not_unloaded_and_takes_no_more() -> None:
    loads = Loads()
    pool = pool_of(loads, PooledModel("a", 2), PooledModel("b", 1))
    async with pool.use("a"):
        other = asyncio.create_task(used(pool, "b"))
        while not pool.named("a").is_leaving:
            await asyncio.sleep(0)
        late = asyncio.create_task(used(pool, "a"))  # behind the model that waits
        await asyncio.sleep(0.01)
        assert loads.events == ["+a"]
    await asyncio.gather(other, late)
    assert loads.events == ["+a", "-a", "+b", "-b", "+a"]


async def test_a_request_that_gives_up_waiting_unloads_nothing() -> None:
    loads = Loads()
    pool = pool_of(loads, PooledModel("a", 2), PooledModel("b", 1))
    async with pool.use("a"):
        with pytest.raises(HttpError, match="in use: 'a' \\(1 requests\\)") as caught:
            async with pool.use("b", limit_s=0.02):
                pass
        assert (caught.value.refusal.status, caught.value.refusal.code) == (503, "model_loading")
        await used(pool, "a")
    assert loads.events == ["+a"]


async def test_a_model_that_cannot_be_loaded_says_why_at_once() -> None:
    loads = Loads()
    loads.broken.add("a")
    pool = pool_of(loads, PooledModel("a", 1))
    for _ in range(2):
        with pytest.raises(HttpError, match="'a' cannot be loaded: its weights are cut short"):
            await used(pool, "a")
    assert loads.events == ["+a"]


async def test_an_idle_model_is_unloaded_after_its_keep_alive() -> None:
    loads = Loads()
    pool = pool_of(loads, PooledModel("a", 1, keep_alive_s=0.01), PooledModel("b", 1))
    await used(pool, "a", "b")
    await until(loads, "-a")
    async with pool.use("b"):
        pool.keep_alive("b", 0.0)
        await asyncio.sleep(0.01)
        assert "-b" not in loads.events
    await until(loads, "-b")


async def test_unload_waits_for_requests_and_then_says_so() -> None:
    loads = Loads()
    pool = pool_of(loads, PooledModel("a", 1), timeout_s=0.05)
    async with pool.use("a"):
        with pytest.raises(HttpError, match="in use by 1 requests"):
            await pool.unload("a")
    assert (await pool.unload("a")).state == "unloaded"
    assert loads.events == ["+a", "-a"]


async def test_a_model_whose_server_dies_under_requests_is_loaded_again() -> None:
    loads = Loads()
    pool = pool_of(loads, PooledModel("a", 1))
    async with pool.use("a"):
        pool.died("a")
        while loads.events != ["+a", "+a"]:
            await asyncio.sleep(0)
    await used(pool, "a")
    pool.died("a")
    assert pool.named("a").state == "unloaded"


@asynccontextmanager
async def served(
    loads: Loads, scripts: dict[str, Any], *, keys: tuple[str, ...] = (), **settings: Any
) -> AsyncGenerator[tuple[Live, ModelPool], None]:
    """A gateway whose models are scripted backends that register when they are loaded. Memory holds one."""
    scripted = {name: Scripted(script, models=(name,)) for name, script in scripts.items()}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(backends(*scripted.values()))

        async def load(name: str) -> None:
            await loads.load(name)
            live.state.discovery.register(Registration(name, scripted[name].url, (name,), 60.0))
            await live.until(lambda: live.state.fleet.named(name).is_ready)

        async def unload(name: str) -> None:
            await loads.unload(name)
            live.state.discovery.deregister(name)

        models = [PooledModel(name, 1) for name in scripts]
        pool = ModelPool(models, 1, load, unload, time.monotonic, load_timeout_s=60.0)
        pool.keys = keys
        live = await stack.enter_async_context(gateway_of(settings, ready=False, pool=pool))
        yield live, pool


async def test_requests_name_models_that_share_the_memory() -> None:
    loads = Loads()
    async with served(loads, {"a": says("from a"), "b": says("from b")}) as (live, _):
        assert (await live.session.get(f"{live.url}/readyz")).status == 200
        for name in ("a", "b", "a"):
            status, body = await live.post({"model": name, "prompt": "x"})
            assert (status, b"from " + name.encode() in body) == (200, True)
        cards = (await (await live.session.get(f"{live.url}/v1/models")).json())["data"]
    assert [(card["id"], card["loaded"]) for card in cards] == [("a", True), ("b", False)]
    assert loads.events == ["+a", "-a", "+b", "-b", "+a"]


async def test_a_stream_keeps_its_model_until_its_end() -> None:
    loads, ended = Loads(), asyncio.Event()

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer)
        await chunk(writer, frame({"id": "c-1", "text": "first"}))
        await ended.wait()
        await chunk(writer, frame({"id": "c-1", "text": "last"}) + b"data: [DONE]\n\n")
        await chunk(writer, b"")

    async with served(loads, {"a": script, "b": says("from b")}) as (live, pool):
        stream = asyncio.create_task(live.post({"model": "a", "prompt": "x", "stream": True}))
        await live.until(lambda: pool.named("a").num_users == 1)
        other = asyncio.create_task(live.post({"model": "b", "prompt": "x"}))
        await live.until(lambda: pool.named("a").is_leaving)
        assert loads.events == ["+a"]
        status, body = await live.post({"model": "b", "prompt": "x", "deadline_ms": 20})
        assert (status, b"model_loading" in body) == (503, True)
        ended.set()
        assert b'"last"' in (await stream)[1]
        assert (await other)[0] == 200
    assert loads.events == ["+a", "-a", "+b"]


async def test_operators_load_and_unload_with_their_own_key() -> None:
    loads = Loads()
    scripts = {"a": says("from a"), "b": says("from b")}
    async with served(loads, scripts, keys=("boss",), api_keys=["client"]) as (live, pool):
        for key, expected in (("client", 401), ("boss", 200)):
            status, body = await live.post({"model": "a"}, "/v1/models/load", authorization=f"Bearer {key}")
            assert status == expected
        assert b'"loaded":true' in body
        status, body = await live.post({"model": "a"}, "/v1/models/unload", authorization="Bearer boss")
        assert (status, b'"state":"unloaded"' in body) == (200, True)
        status, body = await live.post({"model": "aa"}, "/v1/models/load", authorization="Bearer boss")
        assert (status, b"did you mean 'a'" in body) == (404, True)
        pool.is_closed = True
        status, body = await live.post({"model": "a"}, "/v1/models/load", authorization="Bearer boss")
        assert (status, b"--admin-key" in body) == (403, True)
    assert loads.events == ["+a", "-a"]


def device(gib: float) -> DeviceInfo:
    memory = int(gib * GIB)
    return DeviceInfo(
        "cpu", "a CPU", 2, memory_total_bytes=memory, memory_available_bytes=memory, isa="", native=False
    )


def test_names_of_models_are_theirs_or_given() -> None:
    assert named_models(["quill", "small=quill-draft"]) == {"quill": "quill", "small": "quill-draft"}
    with pytest.raises(ConfigError, match="two models are named 'quill'"):
        named_models(["quill", "quill"])


def test_memory_is_shared_out_by_weights_and_kv_cache() -> None:
    paths = {"a": "quill", "b": "quill"}
    total, shares = memory_shares(paths, {"kv_memory": "1GiB"}, ServerArgs(model_memory="4GiB"), device(8))
    assert total == 4 * GIB
    assert shares["a"].kv_bytes == GIB
    assert 0 < shares["a"].fixed_bytes < GIB
    total, shares = memory_shares(paths, {}, ServerArgs(model_memory="3GiB"), device(8))
    assert sum(share.num_bytes for share in shares.values()) <= 3 * GIB
    with pytest.raises(ConfigError, match=r"model_memory = 1.00 GiB does not hold 'a'.*1.00 GiB of KV cache"):
        memory_shares(paths, {"kv_memory": "1GiB"}, ServerArgs(model_memory="1GiB"), device(8))
    args = ServerArgs(model_memory="2GiB", pin=("a",))
    with pytest.raises(ConfigError, match=r"pinned models take .* pin fewer"):
        memory_shares(paths, {"kv_memory": "1GiB"}, args, device(8))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template": "x.jinja"}, "--chat-template is a setting of one server"),
        ({"replicas": 2}, "--replicas is a setting of one server"),
        ({"pin": ("quil",)}, "--pin 'quil' is none of the models quill, b \\(did you mean 'quill'"),
    ],
)
def test_settings_that_several_models_cannot_have(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        serve_models(settings, ["quill", "b=quill"], ServerArgs(**settings))


@pytest.mark.slow
def test_two_models_take_turns_in_memory_for_one(tmp_path: Path) -> None:
    command = ["-m", "quire.cli", "serve", "a=quill", "b=quill-draft", "--port", "0", "--kv-memory", "64MiB"]
    command += ["--model-memory", "0.6GiB", "--threads", "1"]
    with LiveServer(command, tmp_path / "log", ready=r"gateway listening url=(\S+)") as server:
        texts = {}
        for name in ("a", "b", "a"):
            body = {"model": name, "prompt": "It was", "max_tokens": 4, "seed": 1}
            answer = httpx.post(server.url + "/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            text = answer.json()["choices"][0]["text"]
            assert texts.setdefault(name, text) == text
            cards = httpx.get(server.url + "/v1/models").json()["data"]
            assert [card["id"] for card in cards if card["loaded"]] == [name]
        assert server.stop() == 0

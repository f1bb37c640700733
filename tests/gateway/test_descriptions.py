"""What a gateway shows of its replicas' models, and which routes of a single server it has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from tests.api.asgi_client import app_with_jobs
from tests.api.fake_frontend import ANSWER, FakeFrontend
from tests.gateway.live import Live, Received, Scripted, answer, frame, gateway, gateway_of, says
from tests.gateway.test_isolation import gateway_state, served
from tests.gateway.test_proxy import run
from tests.gateway.test_tenants import config, make_keys, rows

from quire.http.refusals import Refusal
from quire_gateway.app import create_gateway
from quire_gateway.cli.gateway import batches
from quire_gateway.filter_config import FilterArgs, FilterConfig
from quire_gateway.filter_kinds import make_filters
from quire_gateway.filtering import Filtering
from quire_gateway.filters import About
from quire_gateway.frames import error_frame

# Routes of a single server that a gateway does not have, and why.
WITHOUT = {
    (
        "/",
        "GET",
    ): "the page has the server's own address and state; a gateway's are in /docs and /admin/backends",
    ("/", "POST"): "a body without a path says what the one model of a server gives; a gateway has several",
    ("/slots", "GET"): "running requests, which may be other tenants'",
    ("/engine/live", "GET"): "what runs in one engine, which may be other tenants'",
    ("/gateway/usage", "GET"): "for the gateway itself",
    ("/gateway/cache", "GET"): "for the gateway itself",
    ("/v1/streams/{stream_id}", "GET"): "a replica's journal; a gateway moves streams by itself",
}
CARD = {"owned_by": "quire", "created": 1700, "root": "m", "parent": None, "max_model_len": 77}


def routes_of(app: Any) -> set[tuple[str, str]]:
    while not isinstance(app, Starlette):
        app = getattr(app, "_app", None) or app.app
    found = [route for route in app.routes if isinstance(route, Route)]
    return {(route.path, method) for route in found for method in (route.methods or {"POST"}) - {"HEAD"}}


def test_a_gateway_has_every_route_of_a_server(tmp_path: Path) -> None:
    """Or the list says why not."""
    make_keys(tmp_path, alice={})
    state = gateway_state(tmp_path, "http://127.0.0.1:9", "gateway")
    there = routes_of(create_gateway(state, batches(state)))
    single = routes_of(app_with_jobs(FakeFrontend(), batch_dir=str(tmp_path / "batches")))
    assert ("/props", "GET") in single
    assert single - there == set(WITHOUT)


@asynccontextmanager
async def before(frontend: FakeFrontend, settings: dict[str, Any], **more: Any) -> AsyncGenerator[Live, None]:
    """Run a gateway before the application that `quire serve` runs."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(app_with_jobs(frontend, **settings)))
        config = {"backends": [{"name": "b0", "url": url}], "health": {"interval_s": 0.05}} | more
        yield await stack.enter_async_context(gateway_of(config))


async def get(live: Live, path: str, **headers: str) -> tuple[int, bytes]:
    async with live.session.get(live.url + path, headers=headers) as response:
        live.headers = response.headers
        return response.status, await response.read()


async def at_both(live: Live, path: str) -> tuple[Any, Any]:
    """Return what the gateway answers, and what its backend does."""
    (backend,) = live.state.fleet
    async with live.session.get(backend.url + path) as response:
        direct = response.status, await response.read()
    status, body = await get(live, path)
    assert (status, direct[0]) == (200, 200), (body, direct)
    return json.loads(body), json.loads(direct[1])


def test_cards_are_those_of_the_replica() -> None:
    async def main() -> None:
        models = [{"name": "chat", "aliases": ["gpt-4o"], "split": {"tiny": 1}}]
        async with before(FakeFrontend(), {}, models=models) as live:
            shown, direct = await at_both(live, "/v1/models")
            card = direct["data"][0]
            del card["fingerprint"]
            assert card["max_model_len"] > 0
            assert card["created"] > 1_600_000_000
            assert {each["id"]: each for each in shown["data"]} == {
                name: card | {"id": name} for name in ("chat", "gpt-4o", "tiny", "alias")
            }
            assert await at_both(live, "/v1/models/tiny") == (card, card | {"fingerprint": FakeAny()})
            assert json.loads((await get(live, "/v1/models/gpt-4o"))[1]) == card | {"id": "gpt-4o"}
            assert (await get(live, "/v1/models/none"))[0] == 404

    run(main())


class FakeAny(str):
    """Equal to every text."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, str)

    __hash__ = str.__hash__


def test_cards_outlive_readiness_and_follow_the_split() -> None:
    async def main() -> None:
        old = Scripted(says("x"), models=("a",), card=CARD)
        new = Scripted(says("x"), models=("b",), card=CARD | {"max_model_len": 99})
        models = [{"name": "m", "split": {"a": 1, "b": 9}}]
        async with gateway(old, new, models=models) as live:
            new.ready = False
            await live.until(lambda: not live.state.fleet.named("b1").is_ready)
            listed = json.loads((await get(live, "/v1/models"))[1])["data"]
            assert {each["id"]: each["max_model_len"] for each in listed} == {"m": 99, "a": 77, "b": 99}

    run(main())


@pytest.mark.parametrize(
    "path", ["/props", "/tokenizer_info", "/info", "/props?model=tiny", "/props?model=tiny:latest"]
)
def test_documents_are_the_replicas(path: str) -> None:
    async def main() -> None:
        async with before(FakeFrontend(), {}) as live:
            shown, direct = await at_both(live, path)
            assert shown == direct
            assert shown

    run(main())


def test_a_description_has_what_the_gateway_serves() -> None:
    async def main() -> None:
        async with before(FakeFrontend(), {}) as live:
            shown, direct = await at_both(live, "/openapi.json")
            assert shown["components"] == direct["components"]
            left = {path for path, _ in WITHOUT}
            assert not left & set(shown["paths"])
            assert {"/v1/chat/completions", "/props", "/v1/models/{model_id}"} <= set(shown["paths"])
            assert all(shown["paths"][path] == direct["paths"][path] for path in shown["paths"])
            status, page = await get(live, "/docs")
            assert (status, live.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert b"/openapi.json" in page
            assert json.loads((await get(live, "/version"))[1])["version"]
            for path in ("/slots", "/engine/live"):
                assert (await get(live, path))[0] == 404

    run(main())


def test_the_page_is_asked_for_once() -> None:
    """It is open to all."""

    async def page(request: Received, writer: asyncio.StreamWriter) -> None:
        await answer(writer, 200, b"<p>", {"content-type": "text/html"})

    backend = Scripted(page, card=CARD)

    async def main() -> None:
        async with gateway(backend, api_keys=["k"]) as live:
            assert [await get(live, "/docs") for _ in range(3)] == [(200, b"<p>")] * 3
            assert (await get(live, "/props"))[0] == 401
        assert [request.path for request in backend.received] == ["/docs"]

    run(main())


def test_no_ready_replica_is_503_with_a_time() -> None:
    """Another server's documents are not relayed: what they say of requests is not known."""

    async def main() -> None:
        foreign = Scripted(says("x"), card=CARD | {"owned_by": "llamacpp"})
        async with gateway(foreign) as live:
            for path in ("/props", "/tokenizer_info", "/openapi.json", "/docs"):
                assert (await get(live, path))[0] == 503
                assert live.headers["retry-after"] == "1"
            assert (await get(live, "/props?model=none"))[0] == 404
        assert not foreign.received

    run(main())


def test_a_document_comes_from_the_replica_that_answers() -> None:
    async def fails(request: Received, writer: asyncio.StreamWriter) -> None:
        await answer(writer, 500, b"{}")

    async def too_long(request: Received, writer: asyncio.StreamWriter) -> None:
        await answer(writer, 200, b" " * (5 << 20))

    async def props(request: Received, writer: asyncio.StreamWriter) -> None:
        assert "authorization" not in request.headers
        await answer(writer, 200, b'{"a":1}', {"x-secret": "1"})

    good = Scripted(props, card=CARD)

    async def main() -> None:
        broken = [Scripted(each, card=CARD) for each in (fails, too_long)]
        async with gateway(*broken, good, api_keys=["k"], max_answer_mib=4) as live:
            assert await get(live, "/props", authorization="Bearer k") == (200, b'{"a":1}')
            assert "x-secret" not in live.headers
            assert all(len(each.received) == 1 for each in broken)

    run(main())


def test_a_key_reads_of_its_own_models(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, small={"models": ("s*",)}, big={})

    async def main() -> None:
        async with before(FakeFrontend(), {}, **config(tmp_path)) as live:
            for who, status in (("small", 404), ("big", 200)):
                for path in ("/props", "/props?model=tiny", "/tokenizer_info"):
                    assert (await get(live, path, authorization=keys[who]))[0] == status
            assert (await get(live, "/openapi.json"))[0] == 401

    run(main())


FORMS: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": "hi", "n_predict": 40},
    "/generate": {"inputs": "hi", "parameters": {"max_new_tokens": 40, "details": True}},
    "/generate_stream": {"inputs": "hi", "parameters": {"max_new_tokens": 40}},
}


@pytest.mark.parametrize("path", FORMS)
def test_forms_of_other_servers_pass(path: str, tmp_path: Path) -> None:
    """With the prompt and the limit reserved, the tokens booked, and the tenants apart."""
    keys = make_keys(tmp_path, alice={}, small={"models": ("s*",)})
    frontend = FakeFrontend(step_s=0.0)

    async def main() -> None:
        limits = {"keys": {"alice": {"output_tokens_per_minute": 50}}}
        async with before(frontend, {}, **config(tmp_path, limits=limits, api_keys=["other"])) as live:
            body, alice = FORMS[path], keys["alice"]
            status, got = await live.post(body, path, authorization=alice)
            assert (status, ANSWER.encode() in got) == (200, True), got
            assert live.headers["content-type"].startswith("text/event-stream") == path.endswith("stream")
            more = json.loads(json.dumps(body).replace("40", "60"))
            assert (await live.post(more, path, authorization=alice))[0] == 429
            assert (await live.post(body, path, authorization=keys["small"]))[0] == 404
            assert (await live.post(body, path))[0] == 401
            swapped = body | {
                "parameters": {**body.get("parameters", {}), "cache_salt": "s", "model": "none"}
            }
            if path != "/completion":
                assert (await live.post(swapped, path, authorization="Bearer other"))[0] == 200
                assert (await live.post(body, path, authorization="Bearer other"))[0] == 200

    run(main())
    salts = [each.kwargs["cache_salt"] for each in frontend.submitted]
    assert len(salts[0]) == 32
    assert salts[0] not in salts[1:]
    assert len(set(salts[1:])) <= 1, "a field inside of parameters chooses no salt"
    ok = rows(tmp_path)["ok"]
    assert ok["output_tokens"] == ok["requests"] * (len(ANSWER.encode()) + 1)


def test_infill_is_reserved_and_salted(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, alice={})
    backend = Scripted(says("x"), card=CARD)

    async def main() -> None:
        limits = {"keys": {"alice": {"input_tokens_per_minute": 100}}}
        async with gateway(backend, **config(tmp_path, limits=limits, api_keys=["other"])) as live:
            for name, size, status in (
                ("input_prefix", 4, 200),
                ("input_prefix", 4000, 429),
                ("input_suffix", 4000, 429),
            ):
                got, _ = await live.post({name: "a" * size}, "/infill", authorization=keys["alice"])
                assert got == status

    run(main())
    assert len(backend.received[0].body["cache_salt"]) == 32
    assert backend.received[0].body["model"] == "m"


def token(text: str, whole: str | None = None) -> bytes:
    return frame({"index": 1, "token": {"id": 9, "text": text, "logprob": 0.0}, "generated_text": whole})


STREAMS = {
    "/generate_stream": [token("my sec"), token("ret."), token(" end", "my secret. end")],
    "/completion": [
        frame({"content": text, "stop": stop})
        for text, stop in (("my sec", False), ("ret.", False), (" end", False), ("", True))
    ],
}


@pytest.mark.parametrize("path", STREAMS)
def test_filters_read_forms_of_other_servers(path: str) -> None:
    given = FilterArgs(name="f", keywords=("secret",), action="redact")
    filters = make_filters([FilterConfig(given)], lambda: None)  # type: ignore[arg-type,return-value]
    assert filters is not None

    async def main() -> None:
        filtering = Filtering(filters, About("r", path, "m", "", ""))
        out = b"".join([await filtering.events(each) for each in STREAMS[path]]) + await filtering.ended(b"")
        assert b"ret" not in out
        assert b"end" in out
        whole = {"generated_text": "a secret", "details": {"tokens": [{"id": 9, "text": "secret"}]}}
        whole = whole if path == "/generate_stream" else {"content": "a secret", "stop": True, "tokens": [9]}
        filtering = Filtering(filters, About("r", path, "m", "", ""))
        assert b"secret" not in (out := await filtering.filtered_body(json.dumps(whole).encode()))
        assert b"9" not in out

    run(main())


def test_a_broken_tgi_stream_ends_in_its_form() -> None:
    value = json.loads(error_frame("/generate_stream", Refusal(502, "gone", code="backend_broken"))[6:])
    assert value == {"error": "gone", "error_type": "backend_broken"}

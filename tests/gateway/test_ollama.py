"""Ollama's API through the gateway: lines are relayed whole, counted, limited, filtered, and end with an error line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.gateway.live import Live, Received, Script, Scripted, answer, begin_stream, chunk, gateway
from tests.gateway.test_proxy import run
from tests.gateway.test_tenants import config, make_keys, rows

from quire_gateway.frames import LINES

ASK = {"model": "m:latest", "messages": [{"role": "user", "content": "hi"}]}
END = {"prompt_eval_count": 5, "prompt_eval_cached_count": 4, "eval_count": 3}


def lines(*pieces: str, breaks: bool = False, **last: Any) -> Script:
    """Answer a chat with ``pieces``, or GET with lists."""

    async def script(request: Received, writer: asyncio.StreamWriter) -> None:
        listed = {"name": "m:latest", "model": "m:latest", "size": 7, "digest": "d"}
        if request.method == "GET":
            await answer(writer, 200, json.dumps({"models": [listed]}).encode())
            return
        if request.path == "/api/show":
            await answer(writer, 200, b'{"capabilities": ["completion"]}')
            return
        said = [{"model": "m", "message": {"role": "assistant", "content": p}, "done": False} for p in pieces]
        end = {"model": "m", "message": {"role": "assistant", "content": ""}, "done": True, **END, **last}
        if request.body.get("stream") is False:
            end["message"]["content"] = "".join(pieces)  # type: ignore[index]
            await answer(writer, 200, json.dumps(end).encode())
            return
        await begin_stream(writer, media_type=LINES)
        for each in said:
            await chunk(writer, json.dumps(each).encode()[:9])
            await chunk(writer, json.dumps(each).encode()[9:] + b"\n")
        if not breaks:
            await chunk(writer, json.dumps(end).encode() + b"\n")
            await chunk(writer, b"")
        writer.close()

    return script


async def ask(live: Live, **more: Any) -> tuple[int, list[dict[str, Any]]]:
    status, body = await live.post(ASK | more, "/api/chat")
    return status, [json.loads(line) for line in body.splitlines()]


def said(found: list[dict[str, Any]]) -> str:
    return "".join(each["message"]["content"] for each in found if "message" in each)


def test_lines_pass_and_are_booked(tmp_path: Path) -> None:
    backend = Scripted(lines("he", "y"))

    async def main() -> None:
        async with gateway(backend, ledger=str(tmp_path / "ledger.sqlite")) as live:
            status, found = await ask(live)
            assert (status, said(found), found[-1]["done"]) == (200, "hey", True)
            assert live.headers["content-type"] == LINES
            status, found = await ask(live, stream=False)
            assert (status, said(found), len(found)) == (200, "hey", 1)
            assert (await ask(live, model="none"))[0] == 404

    run(main())
    assert backend.received[0].raw == json.dumps(ASK).encode()  # with the client's tag
    ok = rows(tmp_path)["ok"]
    assert (ok["requests"], ok["prompt_tokens"], ok["cached_tokens"], ok["output_tokens"]) == (2, 10, 8, 6)


def test_num_predict_is_reserved_and_refused_in_ollamas_form(tmp_path: Path) -> None:
    keys = make_keys(tmp_path, alice={})

    async def main() -> None:
        limits = {"keys": {"alice": {"output_tokens_per_minute": 50}}}
        async with gateway(Scripted(lines("x")), **config(tmp_path, limits=limits)) as live:
            for num, status in ((40, 200), (60, 429)):
                body = json.dumps(ASK | {"options": {"num_predict": num}}).encode()
                got, text = await live.post(body, "/api/chat", authorization=keys["alice"])
                assert got == status
            assert list(json.loads(text)) == ["error"]
            assert "output_tokens_per_minute" in json.loads(text)["error"]
            assert (await live.post(ASK, "/api/chat"))[0] == 401

    run(main())


def test_a_broken_stream_of_lines_ends_with_an_error_line() -> None:
    async def refuses(request: Received, writer: asyncio.StreamWriter) -> None:
        await answer(writer, 503, b"{}")

    async def main() -> None:
        settings: dict[str, Any] = {"routing": {"policy": "round-robin"}}
        async with gateway(Scripted(refuses), Scripted(lines("he", "y", breaks=True)), **settings) as live:
            status, found = await ask(live)
            assert (status, said(found[:-1])) == (200, "hey")
            assert list(found[-1]) == ["error"]

    run(main())


def test_lists_come_from_the_backends() -> None:
    async def main() -> None:
        models = [{"name": "chat", "split": {"m": 1}}, {"name": "gone", "split": {"nowhere": 1}}]
        async with gateway(Scripted(lines("x")), models=models) as live:

            async def get(path: str) -> Any:
                async with live.session.get(live.url + path) as response:
                    return await response.json()

            tags = (await get("/api/tags"))["models"]
            assert {(each["name"], each["size"]) for each in tags} == {
                ("chat:latest", 7), ("gone:latest", 0), ("m:latest", 7),
            }  # fmt: skip
            loaded = (await get("/api/ps"))["models"]
            assert {each["model"] for each in loaded} == {"chat:latest", "m:latest"}
            assert "version" in await get("/api/version")
            status, shown = await live.post({"model": "chat"}, "/api/show")
            assert (status, json.loads(shown)) == (200, {"capabilities": ["completion"]})
            for name in ("chat", "chat:latest"):  # nothing is left to pull
                status, answer = await live.post({"model": name}, "/api/pull")
                assert (status, json.loads(answer)) == (200, {"status": "success"})
            status, refused = await live.post({"model": "another"}, "/api/pull")
            assert (status, list(json.loads(refused))) == (501, ["error"])

    run(main())


def test_lines_are_filtered_by_sentence() -> None:
    filters = [{"name": "f", "keywords": ["secret"], "action": "redact"}]

    async def main() -> None:
        backend = Scripted(lines("A sec", "ret. ", "It ends", context=[1, 2]))
        async with gateway(backend, filters=filters) as live:
            status, found = await ask(live)
            assert (status, said(found)) == (200, "A [removed]. It ends")
            assert "context" not in found[-1]
            assert found[-1]["eval_count"] == 3
            _, found = await ask(live, stream=False)
            assert (said(found), "context" in found[0]) == ("A [removed]. It ends", False)

    run(main())


def test_a_late_stream_of_lines_is_hedged() -> None:
    async def waits(request: Received, writer: asyncio.StreamWriter) -> None:
        await begin_stream(writer, media_type=LINES)
        await asyncio.Event().wait()

    async def main() -> None:
        settings: dict[str, Any] = {"routing": {"policy": "round-robin"}}
        settings["hedging"] = {"after_s": 0.1, "budget": 1.0}
        async with gateway(Scripted(waits), Scripted(lines("hey")), **settings) as live:
            assert said((await ask(live))[1]) == "hey"
            assert live.state.hedging is not None
            assert live.state.hedging.counts["b1", "won"] == 1

    run(main())

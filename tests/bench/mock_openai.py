"""An OpenAI-compatible server in a thread: a script says what each request gets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from aiohttp import web

# body → what to do: "ok", an HTTP status, or one of the faults below
Script = Callable[[dict[str, Any]], str | int]


class MockOpenAI:
    """Serves on a free port of 127.0.0.1 while entered. Tokens come ``step_s`` apart."""

    def __init__(
        self, script: Script = lambda body: "ok", step_s: float = 0.0, refuses: tuple[str, ...] = ()
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.left = 0  # clients that went away before the end
        self.most = 0  # requests at once
        self._now = 0
        self._script, self._step_s, self._refuses = script, step_s, refuses
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MockOpenAI:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "mock", "max_model_len": 100}, {"id": "other"}]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        for name in self._refuses:
            if name in body:
                return web.json_response({"error": {"message": f"{name} is not known"}}, status=400)
        self.bodies.append(body)
        what = self._script(body)
        if isinstance(what, int):
            return web.json_response({"error": {"message": "as scripted"}}, status=what)
        self._now += 1
        self.most = max(self.most, self._now)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            await response.prepare(request)
            return await self._stream(response, body, what)
        except (asyncio.CancelledError, ConnectionResetError):
            self.left += 1
            raise
        finally:
            self._now -= 1

    async def _stream(
        self, response: web.StreamResponse, body: dict[str, Any], what: str
    ) -> web.StreamResponse:
        num = 0 if what == "empty" else body["max_tokens"]
        for i in range(num):
            await asyncio.sleep(self._step_s)
            if what == "cut off" and i == 1:
                return response
            if what == "error event" and i == 1:
                await _send(response, {"error": {"message": "boom"}})
                return response
            if what == "pair" and i % 2:
                continue  # two tokens a chunk, and no ids
            await _send(response, {"choices": [_choice(body, i, what, num)]})
        prompt = body.get("prompt")
        usage = {"prompt_tokens": len(prompt) if isinstance(prompt, list) else 7, "completion_tokens": num}
        usage["prompt_tokens_details"] = {"cached_tokens": 3}  # type: ignore[assignment]
        if num == 0:
            await _send(response, {"choices": [{"text": "", "finish_reason": "stop"}]})
        await _send(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


def _choice(body: dict[str, Any], i: int, what: str, num: int) -> dict[str, Any]:
    text = f"w{i} "
    choice: dict[str, Any] = {"delta": {"content": text}} if "messages" in body else {"text": text}
    if body.get("return_token_ids") and what != "pair":
        choice["token_ids"] = [i]
    last = i + (2 if what == "pair" else 1) >= num
    return choice | {"finish_reason": "length" if last else None}


async def _send(response: web.StreamResponse, value: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")

"""A small client that calls an ASGI app without a socket."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import fields
from typing import Any

import httpx
from starlette.applications import Starlette
from tests.api.fake_frontend import FakeFrontend

from quire.api.app import create_app
from quire.api.settings import ApiSettings
from quire.api.state import is_busy
from quire.jobs.routes import JobSettings, jobs_of


def app_with_jobs(frontend: Any, **settings: Any) -> Starlette:
    """The app that `quire serve` runs, over any frontend. ``settings``: those of the API and of jobs, by name."""
    of = {field.name for field in fields(JobSettings)}
    jobs = JobSettings(**{name: value for name, value in settings.items() if name in of})
    api = {name: value for name, value in settings.items() if name in {f.name for f in fields(ApiSettings)}}
    assert set(settings) <= of | set(api)
    return create_app(
        frontend, ApiSettings(**api), extension=jobs_of(jobs, lambda: is_busy(frontend), time.time)
    )


class Api:
    """One app over a `FakeFrontend`. Each call has an event loop of its own."""

    def __init__(self, frontend: FakeFrontend | None = None, **settings: Any) -> None:
        self.frontend = frontend or FakeFrontend()
        self.app = app_with_jobs(self.frontend, **settings)
        self._bodies = self.app.state.quire.bodies

    def call(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def go() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await client.request(method, path, **kwargs)

        try:
            return asyncio.run(go())
        finally:
            self._bodies.close()  # ends the helper process that a large body starts

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.call("POST", path, json=body, **kwargs)

    def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.post("/v1/chat/completions", body)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 64, **fields})


def events(response: httpx.Response) -> list[Any]:
    """The JSON of each server-sent event, after checking the framing and the end."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    assert blocks[-2] == "data: [DONE]"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, after checking its form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])

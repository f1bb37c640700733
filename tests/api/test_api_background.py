"""Background responses and the input of a response, through the official client against live servers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest
from tests.api.asgi_client import app_with_jobs, error_of
from tests.api.fake_frontend import ANSWER, FakeFrontend
from tests.api.test_api_server import server

from quire.api.app import create_app
from quire.api.settings import ApiSettings


def connected(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="x", max_retries=0)


def wait(client: openai.OpenAI, response_id: str, seen: list[str]) -> Any:
    deadline = time.monotonic() + 60
    while True:
        response = client.responses.retrieve(response_id)
        if response.status != (seen or [None])[-1]:
            seen.append(str(response.status))
        if response.status not in ("queued", "in_progress"):
            return response
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_background_response_is_that_of_the_foreground() -> None:
    with server("60", "1") as (_, url), connected(url) as client:
        asked: dict[str, Any] = {"model": "tiny", "input": "hi", "metadata": {"a": "b"}}
        begun = client.responses.create(**asked, background=True)
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        with pytest.raises(openai.BadRequestError, match="not complete yet"):
            client.responses.create(**asked, previous_response_id=begun.id)
        assert [item.content[0].text for item in client.responses.input_items.list(begun.id)] == ["hi"]  # type: ignore[union-attr]
        seen: list[str] = []
        ended = wait(client, begun.id, seen)
        assert seen[-1] == "completed"
        assert set(seen) <= {"queued", "in_progress", "completed"}
        assert (ended.id, ended.output_text, ended.metadata) == (begun.id, ANSWER, {"a": "b"})
        here = client.responses.create(**asked)
        assert (here.background, here.output_text, here.usage) == (False, ANSWER, ended.usage)
        after = client.responses.create(
            model="tiny", input="more", previous_response_id=begun.id, max_output_tokens=1
        )
        assert after.usage is not None
        assert ended.usage is not None
        assert after.usage.input_tokens > ended.usage.input_tokens
        assert client.responses.cancel(begun.id).status == "completed", "what is over stays as it is"


def test_cancel_delete_and_failure() -> None:
    with server("50", "1") as (_, url), connected(url) as client:
        begun = client.responses.create(model="tiny", input="hi", background=True)
        cancelled = client.responses.cancel(begun.id)
        assert (cancelled.id, cancelled.status, cancelled.output) == (begun.id, "cancelled", [])
        assert client.responses.retrieve(begun.id).status == "cancelled"
        gone = client.responses.create(model="tiny", input="hi", background=True)
        client.responses.delete(gone.id)
        for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                call(gone.id)
        late = client.responses.create(
            model="tiny", input="x" * 2000, background=True
        )  # longer than the context
        failed = wait(client, late.id, [])
        assert failed.status == "failed"
        assert failed.error is not None
        assert "2000" in failed.error.message or "tokens" in failed.error.message


def test_input_items() -> None:
    given: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "function_call", "call_id": "c1", "name": "get", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "And then?"},
    ]
    with server("0", "1") as (_, url), connected(url) as client:
        made = client.responses.create(model="tiny", input=given)
        items = list(client.responses.input_items.list(made.id, order="asc", limit=4))
        assert [item.type for item in items] == [
            "message", "message", "function_call", "function_call_output", "message", "message",
        ]  # fmt: skip
        newest = list(client.responses.input_items.list(made.id))
        assert [item.id for item in newest] == [item.id for item in items][::-1]
        assert len({item.id for item in items}) == 6
        assert [item.content[0].type for item in (items[0], items[4])] == ["input_text", "output_text"]  # type: ignore[union-attr]
        with pytest.raises(openai.NotFoundError):
            client.responses.input_items.list("resp_x")
        with pytest.raises(openai.BadRequestError, match="limit"):
            client.responses.input_items.list(made.id, limit=101)


def test_errors_and_headers_are_those_of_the_foreground() -> None:
    async def go() -> None:
        frontend = FakeFrontend(step_s=0.005)
        app = app_with_jobs(frontend, lenient=True, max_body_bytes=1000, response_store_bytes=0)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            asked = {"input": "hi", "background": True}
            wrong = await client.post("/v1/responses", json={**asked, "temperature": -1})
            assert error_of(wrong, 400)["param"] == "temperature"
            both = await client.post("/v1/responses", json={**asked, "stream": True})
            assert error_of(both, 400)["param"] == "background"
            error_of(await client.post("/v1/responses", json={**asked, "input": "x" * 1000}), 413)
            malformed = await client.post(
                "/v1/responses",
                content=b'{"background": tru',
                headers={"content-type": "application/json"},
            )
            assert error_of(malformed, 400)["code"] == "invalid_json"
            named = {**asked, "colour": "red", "request_id": "mine"}
            begun = await client.post("/v1/responses", json=named)
            assert begun.status_code == 200
            assert begun.headers["x-quire-ignored-fields"] == "colour"
            assert begun.headers["x-request-id"] == "mine"
            path = "/v1/responses/" + begun.json()["id"]
            assert (await client.get(path)).json()["status"] in ("queued", "in_progress")
            deleted = await client.delete(path)  # although nothing is stored
            assert deleted.json()["deleted"] is True
            error_of(await client.get(path), 404)
            assert frontend.num_requests == 0

    asyncio.run(go())


def test_without_jobs_there_is_no_background() -> None:
    app = create_app(FakeFrontend(), ApiSettings())  # type: ignore[arg-type]

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/v1/responses", json={"input": "hi", "background": True})

    assert error_of(asyncio.run(go()), 400)["param"] == "background"

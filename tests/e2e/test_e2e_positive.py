"""A request made from ``/openapi.json`` (by schemathesis) is accepted: it is answered, not refused.

What a schema cannot say is mended first (`fitting`): ids that must be known, names that must differ, room for a prompt.
``POSITIVE_CASES`` and ``POSITIVE_SEED`` change how many cases of each operation are made, and which.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from tests.e2e.conftest import TEMPLATE
from tests.e2e.live import LiveServer

from quire.models.hub import quill_path

schemathesis = pytest.importorskip("schemathesis", reason="not installed: `make dev` does it")

SEED = int(os.environ.get("POSITIVE_SEED", "1"))
GRAMMARS = ('start: "a"', "start: /[a-z]+/", 'root ::= "x" | "y"')
# The same body as another operation's.
TWINS = ("/score", "/rerank", "/v2/rerank", "/v1/chat/completions/render", "/v1/responses/input_tokens")
# Each case holds whole requests.
COSTLY = ("/v1/messages/batches",)


@pytest.fixture(autouse=True)
def same_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis also draws constants of the modules that the process has imported, so of whatever ran before."""
    monkeypatch.setattr(providers, "_get_local_constants", providers.Constants)
    providers.CONSTANTS_CACHE.cache.clear()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = tmp_path_factory.mktemp("positive")
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    command = ["-m", "tests.e2e.serve_fake_engine", str(quill_path("quill")), str(template), "0"]
    with LiveServer([*command, str(folder / "batches"), "8000"], folder / "log") as server:
        yield server
        assert server.stop() == 0, server.log.read_text()


def unique(names: list[dict[str, Any]], key: str) -> None:
    for i, named in enumerate(names):
        named[key] = f"{str(named[key])[:40]}{i}" if key == "custom_id" else f"f{i}"


def fitting(path: str, body: Any, file_id: str) -> Any:
    """Return a case with what a schema cannot say put right."""
    if path == "/v1/messages/batches":
        unique(body["requests"], "custom_id")
        for request in body["requests"]:
            request["params"] = fitting("/v1/messages", request["params"], file_id)
        return body
    for name in ("deadline_ms", "previous_response_id", "dimensions"):
        body.pop(name, None)
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if body.get(name) is not None:
            body[name] = int(body[name]) % 8 + 1
    for name in ("n", "best_of"):
        if body.get(name) is not None:
            body[name] = min(int(body[name]), 4)
    if "input_file_id" in body:
        body["input_file_id"] = file_id
    if body.get("top_logprobs") is not None and path.startswith("/v1/responses"):
        body["include"] = ["message.output_text.logprobs"]
    if body.get("use_beam_search"):
        body.pop("structured_outputs", None)
    tools = body.get("tools") or []
    called = [tool.get("function", tool) for tool in tools]
    unique(called, "name")
    for tool in called:
        unique(tool.get("tools", []), "name")
    choice = body.get("tool_choice")
    if isinstance(choice, dict) and (choice.get("type") in ("tool", "function", "custom")):
        named = next((tool["name"] for tool in called if "tools" not in tool), None)
        if named is None:
            del body["tool_choice"]
        else:
            choice.get("function", choice)["name"] = named
    if path.startswith("/v1/messages"):
        body["messages"] = matched(body["messages"])
    if isinstance(body.get("input"), list) and path.startswith("/v1/responses"):
        calls = {item["call_id"] for item in body["input"] if item.get("type", "").endswith("_call")}
        body["input"] = [{"role": "user", "content": "hi"}, *ordered(body["input"], calls)]
    return body


def matched(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without results of calls that are not there, and calls without a result at the end."""
    seen: set[str] = set()
    for message in messages:
        blocks = message["content"] if isinstance(message["content"], list) else []
        for block in list(blocks):
            if block["type"] == "tool_use":
                seen.add(block["id"])
            elif block["type"] == "tool_result" and block["tool_use_id"] not in seen:
                blocks.remove(block)
    return [*messages, {"role": "user", "content": "hi"}]


def ordered(items: list[dict[str, Any]], calls: set[str]) -> list[dict[str, Any]]:
    """Results of calls come behind them; others are left out."""
    results = [item for item in items if item.get("type", "").endswith("_output")]
    return [item for item in items if item not in results] + [r for r in results if r["call_id"] in calls]


def refusals(live: LiveServer, count: int) -> list[str]:
    """Send ``count`` cases of each operation with a body; return what was refused."""
    schemathesis.openapi.format("lark", st.sampled_from(GRAMMARS))
    found: list[str] = []
    with httpx.Client(base_url=live.url, timeout=60) as client:
        upload = client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", LINE.encode())}
        )
        file_id = upload.json()["id"]

        def send(path: str, body: Any) -> None:
            answer = client.post(path, json=fitting(path, body, file_id))
            # A schema under which nothing is valid is made too.
            if answer.status_code != 200 and "Unsatisfiable schema" not in answer.text:
                found.append(f"{answer.status_code} {path}: {answer.text:.300} {body!r:.600}")

        for operation in schemathesis.openapi.from_url(live.url + "/openapi.json").get_all_operations():
            one = operation.ok()
            if one.body and one.path not in TWINS:
                each(one, max(2, count // 4) if one.path in COSTLY else count, send)
    return found


def each(operation: Any, count: int, send: Any) -> None:
    @seed(SEED)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE))
    def run(case: Any) -> None:
        send(operation.path, case.body)

    run()


LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi", "max_tokens": 2}}'


@pytest.mark.slow
def test_what_the_description_allows_is_accepted(live: LiveServer) -> None:
    count = int(os.environ.get("POSITIVE_CASES", "6"))
    assert not (found := refusals(live, count)), "\n".join(found[:10])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_cases_of_the_description_are_accepted(live: LiveServer) -> None:
    found = refusals(live, int(os.environ.get("POSITIVE_CASES", "300")))
    assert not found, f"{len(found)} refused:\n" + "\n".join(found[:10])

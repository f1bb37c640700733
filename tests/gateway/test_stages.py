"""Stages: those that are off are not loaded, those that are on are called where they say, and none keeps a request."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.gateway.live import Received, Scripted, answer, gateway, says

from quire.errors import ConfigError
from quire.http.keys import ApiKey, create_key
from quire_gateway.build import make_state
from quire_gateway.config_file import gateway_config
from quire_gateway.exchange import Exchange
from quire_gateway.stage import Pipeline, Stage

ASK = {"model": "m", "prompt": "hi"}
# What the stages are made of; a module that another stage needs too is named once.
WINGS = {
    "access_log": ["access_log"],
    "auto": ["auto_model"],
    "filters": ["filters", "filter_kinds", "filtering"],
    "hedging": ["hedging"],
    "key_file": ["salts", "sealed"],
    "ledger": ["books", "booking", "journal", "ledger", "ledger_database", "ledger_row", "replica_usage"],
    "limits": ["limits", "tenants"],
    "redis": ["redis_store"],
    "migration": ["continuing", "migrate", "replica_usage"],
    "pool": ["model_pool", "model_routes"],
    "prefixes": ["prefix_index"],
    "regions": ["regions"],
    "reports": ["reports"],
}
ROOT = Path(__file__).resolve().parents[2]
ON: dict[str, dict[str, Any]] = {
    "access_log": {"access_log": True},
    "auto": {"auto": {"default": "m"}},
    "filters": {"filters": [{"keywords": ["secret"]}]},
    "hedging": {"hedging": {"after_s": 1.0}},
    "key_file": {"key_file": "keys"},
    "limits": {"limits": {"requests_per_minute": 100}},
    "migration": {"gateway_key": "between-us"},
    "regions": {"regions": {"own": "eu"}},
}
LOADED = """
import json, sys, time
from quire_gateway.app import create_gateway
from quire_gateway.config_file import gateway_config
from quire_gateway.build import make_state
import quire_gateway.cli.gateway
plain = {"routing": {"policy": "least-loaded"}, "backends": [{"url": "http://127.0.0.1:1"}]}
create_gateway(make_state(gateway_config(plain | json.loads(sys.argv[1])), time.monotonic, 0))
print(json.dumps([name.partition(".")[2] for name in sys.modules if name.startswith("quire_gateway.")]))
"""


def loaded(settings: dict[str, Any], folder: Path) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOADED, json.dumps(settings)],
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
        timeout=120,
    )
    return set(json.loads(done.stdout))


def test_a_gateway_with_nothing_on_loads_no_stage(tmp_path: Path) -> None:
    names = loaded({}, tmp_path)
    assert not {each for modules in WINGS.values() for each in modules} & names
    assert "proxy" in names


@pytest.mark.parametrize("wing", ON)
def test_a_setting_loads_its_stage_and_no_other(wing: str, tmp_path: Path) -> None:
    create_key(tmp_path / "keys", ApiKey("alice", "lab", "", datetime.now(UTC)))
    names = loaded(ON[wing], tmp_path)
    assert set(WINGS[wing]) <= names
    others = {each for modules in WINGS.values() for each in modules} - set(WINGS[wing])
    assert not others & names


def test_only_what_a_stage_overrides_is_called() -> None:
    called = []

    class Entering(Stage):
        paths = ("/v1/completions",)

        async def enter(self, exchange: Exchange) -> None:
            called.append("enter")

    async def main() -> None:
        for path in ("/v1/completions", "/v1/embeddings"):
            pipeline = Pipeline([Stage(), Entering()], path)
            await pipeline.enter(None)  # type: ignore[arg-type]
            assert pipeline.relayed == ()

    asyncio.run(main())
    assert called == ["enter"]


def test_stages_are_passed_in_the_order_of_the_list() -> None:
    called = []

    class Named(Stage):
        def __init__(self, name: str) -> None:
            self.name = name

        async def serve(self, exchange: Exchange, proceed: Any) -> None:
            called.append(f"{self.name} before")
            await proceed()
            called.append(f"{self.name} behind")

        async def after(self, exchange: Exchange, now: float) -> None:
            called.append(f"{self.name} after")

    async def served() -> None:
        called.append("served")

    async def main() -> None:
        pipeline = Pipeline([Named("a"), Named("b")], "/")
        await pipeline.serve(None, served)  # type: ignore[arg-type]
        await pipeline.after(None, 0.0)  # type: ignore[arg-type]

    asyncio.run(main())
    assert called == ["a before", "b before", "served", "b behind", "a behind", "a after", "b after"]


def test_no_stage_keeps_a_request_that_has_ended(tmp_path: Path) -> None:
    """Answered, refused by a limit, refused by a backend, filtered, and one whose body is no JSON."""

    async def refuses(request: Received, writer: asyncio.StreamWriter) -> None:
        if request.body["prompt"] == "bad":
            await answer(writer, 400, b'{"error": {"message": "no"}}')
        else:
            await says("hello")(request, writer)

    async def main() -> None:
        settings: dict[str, Any] = {
            "ledger": str(tmp_path / "ledger.sqlite"),
            "gateway_key": "between-us",
            "limits": {"requests_per_minute": 3},
            "filters": [{"keywords": ["secret"]}],
            "access_log_file": str(tmp_path / "access.log"),
            "hedging": {"after_s": 5.0, "whole_after_s": 5.0},
        }
        async with gateway(Scripted(refuses), Scripted(refuses), **settings) as live:
            asked = [
                ASK,
                ASK | {"stream": True},
                ASK | {"prompt": "secret"},
                ASK | {"prompt": "bad"},
                ASK,
                b"{",
            ]
            statuses = [(await live.post(body))[0] for body in asked]
            assert statuses == [200, 200, 400, 400, 429, 400]
            await live.until(lambda: live.state.num_open == 0)
            await asyncio.sleep(0.1)
            gc.collect()
            assert not [held for held in gc.get_objects() if type(held) is Exchange]

    asyncio.run(main())


def how_to_stage() -> ModuleType:
    """Return the module that docs/howto-request.md shows."""
    section = (ROOT / "docs" / "howto-request.md").read_text().partition("\n## Add a stage")[2]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    module = ModuleType("at_once")
    exec(code[0], module.__dict__)
    return module


def test_the_stage_of_the_how_to_works() -> None:
    module, go_on = how_to_stage(), asyncio.Event()

    async def slow(request: Received, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        await says("hello")(request, writer)

    async def main() -> None:
        stage = module.AtOnce(2)
        async with gateway(Scripted(slow), stages=[stage]) as live:
            first = [asyncio.create_task(live.post(ASK)) for _ in range(2)]
            await live.until(lambda: sum(load.requests for load in live.state.router.loads) == 2)
            status, body = await live.post(ASK)
            assert (status, json.loads(body)["error"]["code"]) == (503, "at_once")
            go_on.set()
            assert [(await task)[0] for task in first] == [200, 200]
            assert (await live.post(ASK))[0] == 200
            assert stage.num_refused == 1
            assert b"quire:gateway_at_once_refused_total 1.0" in live.state.metrics.exposition("")[0]

    asyncio.run(main())


def test_a_stage_that_cannot_be_made_ends_the_start() -> None:
    with pytest.raises(ConfigError, match="cannot be made"):
        make_state(gateway_config({"filters": [{"hook": "no_such_module:Hook"}]}), lambda: 0.0, 0)

"""The model auto, and fallbacks: which model a request gets, and what its key may use."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.live import Live, Scripted, gateway, says

from quire.errors import ConfigError
from quire.http.keys import ApiKey, create_key
from quire_gateway.auto_config import AutoArgs, AutoConfig
from quire_gateway.auto_model import AutoModel
from quire_gateway.config_file import gateway_config

SHORT, LONG = "hi", "once upon a time " * 100


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


def difficulty(body: dict[str, Any]) -> float:
    if "crash" in body["prompt"]:
        raise ValueError("no idea")
    return 0.9 if "prove" in body["prompt"] else 0.1


async def chosen(live: Live, prompt: str, **headers: str) -> str:
    body = {"model": "auto", "prompt": prompt, "max_tokens": 1}
    assert (await live.post(body, **headers))[0] == 200
    return live.headers["x-quire-model"]


def models() -> tuple[Scripted, Scripted]:
    return Scripted(says("x"), models=("small",)), Scripted(says("x"), models=("large",))


def test_rules_choose_by_length_and_difficulty() -> None:
    rules = [{"model": "small", "max_prompt_tokens": 100, "max_difficulty": 0.5}]
    auto = {"default": "large", "judge": f"{__name__}:difficulty", "rules": rules}

    async def main() -> None:
        small, large = models()
        async with gateway(small, large, auto=auto, default_model="auto") as live:
            assert await chosen(live, SHORT) == "small"
            assert await chosen(live, LONG) == "large"
            assert await chosen(live, "prove it") == "large"
            assert await chosen(live, "crash") == "large"  # without a verdict the rule does not hold
            assert [each.body["model"] for each in small.received] == ["small"]
            assert [each.body["model"] for each in large.received] == ["large"] * 3
            assert (await live.post({"prompt": SHORT}))[0] == 200  # the default is auto
            assert live.headers["x-quire-model"] == "small"
            async with live.session.get(live.url + "/v1/models") as response:
                names = [card["id"] for card in (await response.json())["data"]]
            assert names == ["auto", "small", "large"]

    run(main())


def test_rules_choose_by_tenant_and_budget(tmp_path: Path) -> None:
    file, now = tmp_path / "keys", datetime.now(UTC)
    keys = {
        name: "Bearer " + create_key(file, ApiKey(name, name, "", created=now, models=allowed))
        for name, allowed in (("guest", ()), ("lab", ()), ("large-only", ("large",)))
    }
    rules = [
        {"model": "small", "tenants": ["guest", "large-only"]},
        {"model": "small", "max_budget_left": 0.5},
    ]
    settings = {
        "key_file": str(file),
        "auto": {"default": "large", "rules": rules},
        "limits": {"tenants": {"lab": {"tokens_per_day": 20}}},
    }

    async def main() -> None:
        async with gateway(*models(), **settings) as live:
            assert await chosen(live, SHORT, authorization=keys["guest"]) == "small"
            assert await chosen(live, SHORT, authorization=keys["large-only"]) == "large"
            first = await chosen(live, SHORT, authorization=keys["lab"])
            await chosen(live, SHORT, authorization=keys["lab"])
            third = await chosen(live, SHORT, authorization=keys["lab"])  # 12 of 20 tokens are used
            assert (first, third) == ("large", "small")

    run(main())


def test_a_fallback_is_one_that_the_key_may_use(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    key = create_key(file, ApiKey("a", "a", "", created=datetime.now(UTC), models=("large",)))
    small, large = models()

    async def main() -> None:
        chat = [{"name": "large", "fallbacks": ["small"]}]
        async with gateway(small, large, key_file=str(file), models=chat) as live:
            large.ready = False
            await live.until(lambda: not live.state.fleet.named("b1").is_ready)
            status, _ = await live.post({"model": "large", "prompt": "x"}, authorization="Bearer " + key)
            assert status == 503
            assert not small.received

    run(main())


@pytest.mark.parametrize(
    ("auto", "message"),
    [
        ({"judge": "a:b"}, "default = '' must be the name of another model"),
        ({"default": "auto"}, "default = 'auto' must be"),
        ({"default": "m", "rules": [{}]}, r"auto.rules\[0\]: model = '' must be"),
        ({"default": "m", "rules": [{"model": "s", "min_difficulty": 0.5}]}, "needs .auto. judge"),
        ({"default": "m", "rules": [{"model": "s", "max_budget_left": 2.0}]}, "must be at most 1"),
        ({"default": "m", "rule": []}, "unknown setting 'rule'"),
    ],
)
def test_a_wrong_rule_is_named(auto: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gateway_config({"auto": auto})


def test_a_judge_that_cannot_be_loaded_is_named() -> None:
    for judge in ("nowhere_at_all:judge", "json", "json:nothing"):
        with pytest.raises(ConfigError, match="judge = "):
            AutoModel(AutoConfig(AutoArgs(default="m", judge=judge), ()), lambda a, m: 0, None)  # type: ignore[arg-type]

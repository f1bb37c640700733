"""/metrics of a gateway names tenants to the holder of the admin key, and to everybody only by an option."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.gateway.live import Live, Scripted, gateway, says

from quire.http.keys import ApiKey, create_key

ASK = {"model": "m", "prompt": "hi", "max_tokens": 10}


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


async def scraped(live: Live, key: str | None) -> str:
    headers = {"authorization": f"Bearer {key}"} if key is not None else {}
    async with live.session.get(live.url + "/metrics", headers=headers) as response:
        assert response.status == 200
        return await response.text()


def test_metrics_name_tenants_to_the_admin_key_alone(tmp_path: Path) -> None:
    async def main() -> None:
        keys = tmp_path / "keys"
        text = create_key(keys, ApiKey(name="bob", tenant="secret-lab", digest="", created=datetime.now(UTC)))
        settings = {"key_file": str(keys), "admin_key": "root"}
        async with gateway(Scripted(says("hello")), **settings) as live:
            assert (await live.post(ASK, authorization=f"Bearer {text}"))[0] == 200
            for key in (None, text, "roo", "roots", ""):
                open_text = await scraped(live, key)
                assert "secret-lab" not in open_text, key
                assert "quire:gateway_requests_total" in open_text
                assert "process_open_fds" in open_text
            assert 'tenant="secret-lab"' in await scraped(live, "root")
        for more, shown in (({}, False), ({"metrics_tenants": True}, True)):
            async with gateway(Scripted(says("hello")), key_file=str(keys), **more) as live:
                assert (await live.post(ASK, authorization=f"Bearer {text}"))[0] == 200
                assert ("secret-lab" in await scraped(live, None)) is shown

    run(main())

"""/readyz tells of the engine, /livez of the process, which a restart helps only where the engine is dead."""

from __future__ import annotations

import pytest
from tests.api.asgi_client import Api

from quire.engine.client import EngineHealth


@pytest.mark.parametrize("status", ["restarting", "hung", "unsound"])
def test_readyz_tells_why_the_engine_is_not_ready(status: str) -> None:
    api = Api()
    assert api.call("GET", "/readyz").json() == {"status": "ready"}
    api.frontend.engine_health = EngineHealth(status, "a reason", num_restarts=2, retry_in_s=1.23456)  # type: ignore[arg-type]
    answer = api.call("GET", "/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"status": status, "reason": "a reason", "restarts": 2, "retry_in_s": 1.235}
    assert api.call("GET", "/livez").status_code == 200
    assert api.complete().status_code == 200, "requests are still taken: the next engine computes them"


def test_a_dead_engine_is_not_live() -> None:
    api = Api()
    api.frontend.state = "dead"
    assert api.call("GET", "/livez").status_code == 503

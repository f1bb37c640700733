"""The admin surface over a frontend without an engine: settings, drain, cancel, and whom it answers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.asgi_client import Api, error_of
from tests.api.raw_asgi import RawCall

from quire.api.admin import RUNTIME, create_admin_app
from quire.config import SchedulerConfig
from quire.cost.cost_model import CostModel, Curve
from quire.engine.messages import ControlPolicy
from quire.errors import ConfigError
from quire.http.listen import bind_admin
from quire.scheduler.policies.slo import SloController
from quire.scheduler.settings import PolicyChange

DOCS = Path(__file__).resolve().parents[2] / "docs"


class AdminApi(Api):
    """Calls go to the admin app; `main` is the API's own."""

    def __init__(self, *keys: str, **settings: Any) -> None:
        super().__init__(**settings)
        self.main = self.app
        self.app = create_admin_app(self.main, keys=keys)


def test_changed_settings_are_answered_with_the_old_values() -> None:
    api = AdminApi()
    start = SchedulerConfig()
    before = api.call("GET", "/runtime").json()["runtime"]
    assert set(before) == set(RUNTIME)
    assert before["order"] == "fcfs"
    assert before["dynamic_max_wait_ms"] == 50.0
    body = {"order": "priority", "gate": "dynamic", "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_queue": 9,
            "long_prefill_token_threshold": 48, "dynamic_max_wait_ms": 20, "spec_tokens": 0,
            "spec_tree": 1}  # fmt: skip
    answer = api.call("PATCH", "/runtime", json=body).json()
    assert answer["runtime"] == body == api.call("GET", "/runtime").json()["runtime"]
    assert answer["changed"] == {name: {"old": before[name], "new": body[name]} for name in body}
    one = api.call("PATCH", "/runtime", json={"max_num_seqs": start.max_num_seqs}).json()
    assert one["changed"] == {"max_num_seqs": {"old": 8, "new": start.max_num_seqs}}


@pytest.mark.parametrize(
    ("body", "param", "allowed"),
    [
        ({"order": "random"}, "order", "'fcfs', 'priority'"),
        ({"gate": 3}, "gate", "'static', 'dynamic'"),
        ({"max_num_seqs": 0}, "max_num_seqs", "1…256"),
        ({"max_num_seqs": 257}, "max_num_seqs", "1…256"),
        ({"max_num_seqs": 2.5}, "max_num_seqs", "an integer"),
        ({"max_num_batched_tokens": 4096}, "max_num_batched_tokens", "1…2048"),
        ({"max_queue": -1}, "max_queue", "1…"),
        ({"max_queue": 2**64}, "max_queue", "9223372036854775807"),
        ({"max_queue": "5"}, "max_queue", "an integer"),
        ({"dynamic_max_wait_ms": -1}, "dynamic_max_wait_ms", "≥ 0"),
        ({"spec_tokens": 4}, "spec_tokens", "--speculate"),
        ({"spec_tokens": "many"}, "spec_tokens", "0…32"),
        ({"max_num_seq": 3}, "max_num_seq", "max_num_seqs"),
        ({}, None, "max_queue"),
        ([], None, "an object"),
    ],
)
def test_a_wrong_setting_names_the_allowed_and_changes_nothing(
    body: Any, param: str | None, allowed: str
) -> None:
    api = AdminApi()
    before = api.call("GET", "/runtime").json()
    sent = {**body, "order": body.get("order", "priority")} if body else body
    error = error_of(api.call("PATCH", "/runtime", json=sent), 400)
    assert error["param"] == param
    assert allowed in error["message"]
    assert api.call("GET", "/runtime").json() == before


def test_what_is_set_under_an_slo_is_pinned_until_it_is_released() -> None:
    api = AdminApi()
    core = api.frontend._core
    model = CostModel(0.01, Curve((0.0, 1.0), (0.0, 1e-4)))
    core.scheduler.use_step_time(model)
    core.controller = SloController(core.scheduler.predictor, core.scheduler.config, tpot_s=0.02)
    wish = ControlPolicy(PolicyChange(max_num_seqs=4, max_num_batched_tokens=100))

    def runtime() -> tuple[int, int, list[str]]:
        core._inbox.append(wish)  # as the controller sends it after a step
        answer = api.call("GET", "/runtime").json()
        return (
            answer["runtime"]["max_num_seqs"],
            answer["runtime"]["max_num_batched_tokens"],
            answer["pinned"],
        )

    assert runtime() == (4, 100, [])
    set_ = api.call("PATCH", "/runtime", json={"max_num_seqs": 8, "max_queue": 9}).json()
    assert set_["changed"]["max_num_seqs"] == {"old": 4, "new": 8}
    assert set_["pinned"] == ["max_num_seqs"]  # a queue is not the controller's
    assert runtime() == (8, 100, ["max_num_seqs"])
    both = {"max_num_batched_tokens": 64, "release": ["max_num_seqs"]}
    assert api.call("PATCH", "/runtime", json=both).json()["pinned"] == ["max_num_batched_tokens"]
    assert runtime() == (4, 64, ["max_num_batched_tokens"])
    last = api.call("PATCH", "/runtime", json={"release": ["max_num_batched_tokens"]}).json()
    assert last["changed"] == {}
    assert last["pinned"] == []
    assert runtime() == (4, 100, [])
    for wrong in ({"release": ["max_num_seqs"], "max_num_seqs": 3}, {"release": ["max_queue"]}):
        assert str(error_of(api.call("PATCH", "/runtime", json=wrong), 400)["param"]).startswith("release")
    assert runtime() == (4, 100, [])


def test_without_an_slo_nothing_is_pinned_or_released() -> None:
    api = AdminApi()
    assert "pinned" not in api.call("PATCH", "/runtime", json={"max_num_seqs": 8}).json()
    error = error_of(api.call("PATCH", "/runtime", json={"release": ["max_num_seqs"]}), 400)
    assert error["param"] == "release"
    assert "--slo" in error["message"]
    assert api.call("GET", "/runtime").json()["runtime"]["max_num_seqs"] == 8


def test_drain_refuses_and_undrain_admits() -> None:
    api = AdminApi()
    assert api.call("GET", "/drain").json()["state"] == "ready"
    assert api.call("POST", "/drain").json() == {
        "object": "drain", "state": "draining", "drained": True, "num_requests": 0, "num_running": 0, "num_waiting": 0,
    }  # fmt: skip
    admin, api.app = api.app, api.main
    refused = api.chat()
    error_of(refused, 503)
    assert refused.headers["retry-after"] == "1"
    assert api.call("GET", "/readyz").status_code == 503
    api.app = admin
    assert api.call("POST", "/undrain").json()["state"] == "ready"
    api.app = api.main
    assert api.chat().status_code == 200


def test_cancel_ends_a_request_under_each_of_its_ids() -> None:
    api = AdminApi()
    api.frontend.gate = None

    async def run(stream: bool, by: str) -> None:
        api.frontend.gate = asyncio.Event()
        body = {
            "messages": [{"role": "user", "content": "hi"}],
            "stream": stream,
            "request_id": "mine",
            "n": 2,
        }
        call = RawCall(api.main, "/v1/chat/completions", body)
        transport = httpx.ASGITransport(app=api.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://admin") as admin:
            while (
                not (data := (await admin.get("/requests")).json()["data"])
                or not data[0]["completion_tokens"]
            ):
                await asyncio.sleep(0.01)
            (one,) = data
            assert one["request_id"] == "mine"
            assert one["num_choices"] == 2
            answer = await admin.post(f"/requests/{one[by]}/cancel")
            assert answer.json() == {"id": one[by], "object": "request.cancelled", "cancelled": 1}
            await asyncio.wait_for(call.task, 60)
            assert (await admin.get("/requests")).json()["data"] == []
            again = await admin.post(f"/requests/{one[by]}/cancel")
            assert error_of(again, 404)["code"] == "request_not_found"
        text = b"".join(message.get("body", b"") for message in call.sent).decode()
        assert '"code":"cancelled"' in text
        assert text.count("cancelled by an operator") == 1
        assert call.sent[0]["status"] == (200 if stream else 499)
        assert api.frontend.submitted[-1].aborted

    for stream in (False, True):
        for by in ("id", "request_id"):
            asyncio.run(run(stream, by))


def test_the_prefix_cache_is_reset() -> None:
    assert AdminApi().call("POST", "/reset_prefix_cache").json() == {
        "object": "prefix_cache.reset", "num_freed_blocks": 0,
    }  # fmt: skip


def test_keys_and_browsers() -> None:
    api = AdminApi("secret", api_keys=("client",))
    for key in ("", "client"):
        error_of(api.call("GET", "/runtime", headers={"authorization": f"Bearer {key}"}), 401)
    good = {"authorization": "Bearer secret"}
    assert api.call("GET", "/runtime", headers=good).status_code == 200
    for name, value in (("origin", "http://localhost:3000"), ("sec-fetch-site", "same-origin")):
        error_of(api.call("POST", "/drain", headers={**good, name: value}), 403)
    assert api.frontend.state == "ready"
    error_of(api.call("POST", "/v1/chat/completions", headers=good), 404)
    error_of(api.call("DELETE", "/runtime", headers=good), 405)


def test_the_main_port_has_none_of_it() -> None:
    api = Api()
    for path in ("/runtime", "/drain", "/undrain", "/reset_prefix_cache", "/requests"):
        error_of(api.call("POST", path), 404)


def test_every_admin_route_is_in_the_docs() -> None:
    text = (DOCS / "operations.md").read_text()
    for route in AdminApi().app.router.routes:
        path = route.path.replace(":path", "")  # type: ignore[attr-defined]
        assert f"{path}`" in text, path
    for name in RUNTIME:
        assert f"`{name}`" in text, name


def test_where_it_listens(tmp_path: Path) -> None:
    assert bind_admin(host="127.0.0.1", port=None, path=None, has_key=False) is None
    with pytest.raises(ConfigError, match="--admin-key"):
        bind_admin(host="0.0.0.0", port=0, path=None, has_key=False)
    for host, has_key in (("127.0.0.1", False), ("localhost", False), ("0.0.0.0", True)):
        bound = bind_admin(host=host, port=0, path=None, has_key=has_key)
        assert bound is not None
        bound[0].close()
    path = str(tmp_path / "admin.sock")
    with pytest.raises(ConfigError, match="--admin-port and --admin-socket"):
        bind_admin(host="127.0.0.1", port=0, path=path, has_key=False)
    bound = bind_admin(host="127.0.0.1", port=None, path=path, has_key=False)
    assert bound is not None
    assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
    with bound[0] as listening:
        listening.listen()
        with pytest.raises(ConfigError, match="another server"):
            bind_admin(host="127.0.0.1", port=None, path=path, has_key=False)
    replaced = bind_admin(
        host="127.0.0.1", port=None, path=path, has_key=False
    )  # left behind by a dead server
    assert replaced is not None
    assert isinstance(replaced[0], socket.socket)
    replaced[0].close()
    plain = tmp_path / "file"
    plain.write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="no socket"):
        bind_admin(host="127.0.0.1", port=None, path=str(plain), has_key=False)

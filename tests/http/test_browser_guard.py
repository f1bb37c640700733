"""Pages of other sites: refused at server, gateway, cockpit and admin, whatever method and form of body they try."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from starlette.types import ASGIApp
from tests.api.asgi_client import Api, app_with_jobs
from tests.api.fake_frontend import FakeFrontend
from tests.gateway.live import Scripted, gateway, says

from quire.api.admin import create_admin_app
from quire.errors import ConfigError
from quire.http.browser_guard import BrowserRules, allowed_hosts, open_note
from quire_gateway.app import create_gateway
from quire_gateway.build import make_state
from quire_gateway.config_file import gateway_config

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FOREIGN = ["http://evil.example", "https://localhost.evil.example", "null", "chrome-extension://abc",
           "http://127.0.0.1.evil.example", "http://evil.example:8000", "about:blank", ""]  # fmt: skip
OURS = ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8080", "http://ui.localhost:5173", "app://obsidian.md",
        "tauri://localhost", "http://tauri.localhost", "file://", "vscode-webview://1f2e", "http://test"]  # fmt: skip
# What a page sends without a preflight, and the two that have one. Status of a guarded surface: 403 for all.
BODIES: list[tuple[str, dict[str, str]]] = [
    ("POST", {}), ("POST", {"content-type": "text/plain"}),
    ("POST", {"content-type": "multipart/form-data; boundary=b"}),
    ("POST", {"content-type": "application/x-www-form-urlencoded"}), ("POST", {"content-type": "application/json"}),
    ("GET", {}), ("HEAD", {}), ("DELETE", {}), ("OPTIONS", {"access-control-request-method": "POST"}),
]  # fmt: skip
PATHS = ["/v1/chat/completions", "/v1/responses", "/v1/files", "/v1/models", "/metrics", "/docs", "/", "/api/chat",
         "/admin/backends", "/v1/models/load", "/runtime", "/cockpit/live"]  # fmt: skip
BODY = (
    b'{"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "input": "hi", "background": true}'
)


def server(**settings: Any) -> ASGIApp:
    return app_with_jobs(FakeFrontend(), **settings)


def admin(**settings: Any) -> ASGIApp:
    return create_admin_app(app_with_jobs(FakeFrontend()), hosts=settings.get("allowed_hosts"))


def gateway_app(**settings: Any) -> ASGIApp:
    config = gateway_config({"backends": [{"url": "http://127.0.0.1:9"}], **settings})
    return create_gateway(make_state(config, lambda: 0.0, 0))


def cockpit(**settings: Any) -> ASGIApp:
    pytest.importorskip("nicegui", reason="the extra `cockpit` is not installed")
    from quire_lab.cockpit.app import page_application
    from quire_lab.cockpit.watched import Watched

    return page_application(Watched("http://127.0.0.1:9"), BrowserRules(hosts=settings.get("allowed_hosts")))


SURFACES: dict[str, Callable[..., ASGIApp]] = {
    "server": server, "admin": admin, "gateway": gateway_app, "cockpit": cockpit,
}  # fmt: skip


def ask(app: ASGIApp, method: str, path: str, headers: dict[str, str], body: bytes = BODY) -> httpx.Response:
    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, headers=headers, content=body)

    return asyncio.run(go())


@pytest.mark.parametrize("surface", [*SURFACES])
def test_foreign_pages_are_refused_in_every_form(surface: str) -> None:
    app = SURFACES[surface]()
    for method, headers in BODIES:
        for path in PATHS:
            for origin in FOREIGN[: 8 if path == PATHS[0] else 1]:
                answer = ask(app, method, path, {"origin": origin, **headers})
                assert answer.status_code == 403, (method, path, origin, headers)
                assert "access-control-allow-origin" not in answer.headers
            without = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", **headers}
            assert ask(app, method, path, without).status_code == 403, (method, path, headers)


def test_a_foreign_page_has_no_effect() -> None:
    """Without a Content-Type, as `fetch` sends a Blob: it generated, began responses and stored files."""
    api = Api()
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/completions", "/api/chat"):
        assert (
            api.call("POST", path, content=BODY, headers={"origin": "http://evil.example"}).status_code == 403
        )
    assert not api.frontend.submitted
    told = api.call("GET", "/v1/models", headers={"origin": "http://evil.example"}).json()["error"]
    assert told["code"] == "origin_not_allowed"
    assert "--cors-origins" in told["message"]


@pytest.mark.parametrize("surface", ["server", "gateway"])
def test_pages_of_this_machine_and_own_pages_pass(surface: str) -> None:
    app = SURFACES[surface]()
    for origin in OURS:
        assert ask(app, "GET", "/v1/models", {"origin": origin}).status_code == 200, origin
    own = {"origin": "https://api.example.com", "x-forwarded-host": "api.example.com"}
    assert ask(app, "GET", "/v1/models", own).status_code == 200
    assert ask(app, "GET", "/v1/models", {"sec-fetch-site": "same-origin"}).status_code == 200
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert ask(app, "GET", "/livez", link).status_code == 200
    assert ask(app, "POST", "/v1/models", link).status_code == 403
    assert ask(app, "GET", "/livez", {**link, "sec-fetch-dest": "iframe"}).status_code == 403


@pytest.mark.parametrize("surface", ["server", "gateway"])
def test_configured_origins_replace_those_of_this_machine(surface: str) -> None:
    names = ("https://ui.example.com", "chrome-extension://*")
    some = SURFACES[surface](cors_origins=names if surface == "server" else [*names])
    for origin, status in (
        ("https://ui.example.com", 200),
        ("chrome-extension://abcdef", 200),
        ("http://localhost:3000", 403),
        ("https://ui.example.com.evil.example", 403),
        ("https://uiXexample.com", 403),
    ):
        answer = ask(some, "GET", "/v1/models", {"origin": origin})
        assert answer.status_code == status, origin
        assert answer.headers.get("access-control-allow-origin") == (origin if status == 200 else None)
    every = SURFACES[surface](cors_origins=("*",) if surface == "server" else ["*"])
    assert ask(every, "GET", "/v1/models", {"origin": "http://any.example"}).status_code == 200
    assert ask(every, "GET", "/v1/models", {"sec-fetch-site": "cross-site"}).status_code == 200


@pytest.mark.parametrize("surface", [*SURFACES])
def test_on_loopback_a_foreign_host_is_refused(surface: str) -> None:
    """A page of evil.example, a name that was made to resolve to 127.0.0.1, could read all of it."""
    rules = {} if surface == "gateway" else {"allowed_hosts": allowed_hosts("127.0.0.1", ())}
    app = SURFACES[surface](**rules)
    path = {"admin": "/runtime", "cockpit": "/cockpit/static/quire.svg"}.get(surface, "/v1/models")
    for host in (
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.localhost.example",
    ):
        answer = ask(app, "GET", path, {"host": host})
        assert answer.status_code == 403, host
        if surface != "cockpit":
            assert answer.json()["error"]["code"] == "host_not_allowed"
        assert "--allowed-hosts" in answer.text
        assert ask(app, "GET", path, {"host": host, "origin": f"http://{host}"}).status_code == 403
    for host in (
        "127.0.0.1:8000",
        "localhost:8000",
        "[::1]:8000",
        "quire",
        "ui.localhost",
        "host.docker.internal:8000",
    ):
        assert ask(app, "GET", path, {"host": host}).status_code != 403, host


def test_allowed_hosts_are_whole_names() -> None:
    rules = BrowserRules(hosts=allowed_hosts("127.0.0.1", ["API.example.com", "*.lan.example"]))
    for host in (
        "api.example.com",
        "api.example.com:443",
        "Api.Example.com",
        "a.lan.example",
        "b.a.lan.example:1",
        "",
    ):
        assert rules.allows_host(host), host
    for host in (
        "evilapi.example.com",
        "x.api.example.com",
        "lan.example",
        "evillan.example",
        "api.example.com.evil.net",
    ):
        assert not rules.allows_host(host), host
    assert allowed_hosts("0.0.0.0", ()) is None
    assert allowed_hosts("0.0.0.0", ["a.example"]) == ("a.example",)
    assert allowed_hosts("127.0.0.1", ["*"]) is None
    for wrong in ("http://a.example", "a.example:80", "a/b", "*a.example", ""):
        with pytest.raises(ConfigError, match="must be a name"):
            allowed_hosts("127.0.0.1", [wrong])


def test_a_start_open_to_all_says_so() -> None:
    note = open_note("0.0.0.0", (), has_keys=False, option="--api-key")
    assert note is not None
    assert "\n" not in note
    assert "--api-key" in note
    assert open_note("0.0.0.0", (), has_keys=True, option="--api-key") is None
    assert open_note("0.0.0.0", ("a.example",), has_keys=False, option="--api-key") is None
    assert open_note("127.0.0.1", (), has_keys=False, option="--api-key") is None


def listeners() -> dict[str, BrowserRules]:
    """The rules of each server in deploy/, by its file: its address, and what its configuration allows."""
    found = {}
    for path in [*DEPLOY.rglob("*.toml")]:
        args = tomllib.loads(path.read_text())
        found[str(path.relative_to(DEPLOY))] = BrowserRules(
            hosts=allowed_hosts(args["host"], args.get("allowed_hosts", ()))
        )
    for path in [*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.service")]:
        for host in re.findall(r"--host[\", ]+([0-9.]+)", path.read_text()):
            found[str(path.relative_to(DEPLOY))] = BrowserRules(hosts=allowed_hosts(host, ()))
    envoy = (DEPLOY / "envoy/envoy.yaml").read_text()
    (line,) = re.findall(r"^# gateway.toml: (.*)$", envoy, re.MULTILINE)
    args = tomllib.loads(line.replace("; ", "\n"))
    found["envoy/envoy.yaml"] = BrowserRules(hosts=allowed_hosts("127.0.0.1", args["allowed_hosts"]))
    return found


NAMES = {
    "compose/gateway.toml": ["localhost:8080", "127.0.0.1:8080", "gateway:8080", "llm.example.com"],
    "compose/compose.yaml": ["replica-1:8000", "replica-2:8000"],
    "kubernetes/gateway.toml": ["gateway:8080", "gateway.quire.svc.cluster.local:8080", "10.1.2.3:8080"],
    "kubernetes/replicas.yaml": ["replicas:8000", "10.1.2.3:8000", "10-1-2-3.replicas.quire.svc.cluster.local:8000"],
    "envoy/envoy.yaml": ["llm.example.com", "gateway", "127.0.0.1:8080"],
    "systemd/quire.service": ["127.0.0.1:8000", "localhost:8000"],
}  # fmt: skip


def test_every_name_of_deploy_is_allowed() -> None:
    rules = listeners()
    assert set(rules) == set(NAMES)
    for file, names in NAMES.items():
        assert [name for name in names if not rules[file].allows_host(name)] == [], file
    texts = "".join(path.read_text() for path in DEPLOY.rglob("*.y*ml"))
    targets = set(re.findall(r'[\["/]([a-z0-9.-]+:80[08]0)\b', texts))
    assert targets, "backends, scraped targets and probes"
    assert [name for name in targets if not any(one.allows_host(name) for one in rules.values())] == []
    local = BrowserRules(hosts=allowed_hosts("127.0.0.1", ()))
    assert all(local.allows_host(name) for name in targets), "they would pass on loopback as well"


def test_a_gateway_says_nothing_of_pages_to_backends() -> None:
    async def go() -> None:
        backend = Scripted(says("hi"))
        async with gateway(backend) as live:
            named = {
                "origin": "http://localhost:3000",
                "sec_fetch_site": "same-site",
                "sec_fetch_mode": "cors",
            }
            status, _ = await live.post({"model": "m", "prompt": "x"}, **named)
            assert status == 200
        names = {name for request in backend.received for name in request.headers}
        assert not {name for name in names if name == "origin" or name.startswith("sec-fetch")}

    asyncio.run(go())


def test_websockets_of_foreign_names_are_refused() -> None:
    async def go() -> None:
        async with gateway(Scripted(says("hi"))) as live:
            for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await live.session.ws_connect(
                        live.url.replace("http", "ws", 1) + "/v1/ws", headers=headers
                    )
                assert refused.value.status == 403

    asyncio.run(go())

"""A page of another site in Chromium: server, gateway and cockpit serve none of its requests, rebound or not."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("nicegui", reason="the extra `cockpit` is not installed")

from tests.cockpit.browser import CHROMIUM, DRIVER, MISSING, WAIT_S
from tests.e2e.live import LiveServer
from tests.gateway.services import free_port, wait_until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    # selenium and a browser that is gone leave sockets to the collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
SERVE = ["-m", "quire.cli", "serve", "quill", "--port", "0", "--threads", "1", "--num-kv-blocks", "256"]
# What a page may send without asking the server before, and what it asks for; each says what came of it.
TRIES = """
const [url, done] = arguments;
const body = JSON.stringify({model: 'quill', messages: [{role: 'user', content: 'hi'}], max_tokens: 4});
const tried = async (go) => { try { return await go() } catch (error) { return 'failed' } };
const sent = (path, init) => tried(async () => {
  const answer = await fetch(url + path, init); return answer.type + ' ' + answer.status + ' ' + await answer.text() });
const socket = (path) => new Promise((end) => {
  const made = new WebSocket(url.replace('http', 'ws') + path);
  made.onopen = () => end('open'); made.onerror = () => end('failed') });
(async () => done({
  blob: await sent('/v1/chat/completions', {method: 'POST', mode: 'no-cors', body: new Blob([body])}),
  text: await sent('/v1/chat/completions', {method: 'POST', mode: 'no-cors', body}),
  json: await sent('/v1/chat/completions', {method: 'POST', body, headers: {'content-type': 'application/json'}}),
  read: await sent('/v1/models', {}),
  page: await sent('/', {}),
  socket: await socket('/v1/ws'),
  cockpit: await socket('/_nicegui_ws/socket.io/?EIO=4&transport=websocket'),
}))()
"""


class Browser:
    """Chromium, for which every name of evil.example is this machine."""

    def __init__(self) -> None:
        webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--host-resolver-rules=MAP *.evil.example 127.0.0.1",
            "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests",
        ):  # fmt: skip
            options.add_argument(argument)
        self.driver = webdriver.Chrome(
            options=options, service=webdriver.ChromeService(executable_path=DRIVER)
        )
        self.driver.set_script_timeout(WAIT_S)

    def tries(self, page: str, url: str) -> dict[str, str]:
        """What a page at ``page`` gets from the server at ``url``."""
        self.driver.get(page)
        return dict(self.driver.execute_async_script(TRIES, url))


class Site(http.server.BaseHTTPRequestHandler):
    """The other site: one empty page, which has a form too."""

    def do_GET(self) -> None:
        target = self.path.partition("?to=")[2]
        form = f"<form method=post enctype=text/plain action='{target}/v1/completions'><input name=a></form>"
        page = f"<!doctype html><body>{form if target else ''}</body>".encode()
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://www.evil.example:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.driver.quit()


@pytest.fixture(scope="module")
def surfaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The address of each, all of them listening on 127.0.0.1 without a key."""
    folder: Path = tmp_path_factory.mktemp("foreign")
    config = folder / "gateway.toml"
    with ExitStack() as stack:
        server = stack.enter_context(LiveServer(SERVE, folder / "serve.log"))
        config.write_text(f'port = 0\naccess_log = true\n[[backends]]\nurl = "{server.url}"\n')
        gateway = stack.enter_context(
            LiveServer(
                ["-m", "quire.cli", "gateway", "--config", str(config)], folder / "gateway.log",
                ready=r"gateway listening url=(\S+)",
            )
        )  # fmt: skip
        port = free_port()
        cockpit = stack.enter_context(
            LiveServer(
                ["-m", "quire.cli", "cockpit", server.url, "--port", str(port)], folder / "cockpit.log",
                ready=r"cockpit  of \S+ on (\S+)",
            )
        )  # fmt: skip
        wait_until(lambda: is_up(cockpit.url), "the start of the cockpit")
        wait_until(lambda: httpx.get(gateway.url + "/readyz").status_code == 200, "a ready backend")
        yield {"server": server.url, "gateway": gateway.url, "cockpit": cockpit.url}


def is_up(url: str) -> bool:
    try:
        return httpx.get(url, timeout=WAIT_S).status_code == 200
    except httpx.TransportError:
        return False


def generated(surfaces: dict[str, str]) -> str:
    """The server's own count of tokens."""
    lines = httpx.get(surfaces["server"] + "/metrics").text.splitlines()
    return next(line for line in lines if line.startswith("vllm:generation_tokens_total{"))


@pytest.mark.parametrize("surface", ["server", "gateway", "cockpit"])
def test_a_foreign_page_gets_nothing_and_has_no_effect(
    surface: str, surfaces: dict[str, str], browser: Browser, site: str
) -> None:
    url, before = surfaces[surface], generated(surfaces)
    got = browser.tries(site, url)
    assert set(got.values()) <= {"failed", "opaque 0 "}, got
    browser.driver.get(f"{site}?to={url}")
    browser.driver.execute_script("document.forms[0].submit()")
    source = "return document.body.innerText"
    wait_until(lambda: "may not call" in browser.driver.execute_script(source), "the answer to the form")
    assert generated(surfaces) == before


@pytest.mark.parametrize("surface", ["server", "gateway", "cockpit"])
def test_a_rebound_name_reads_nothing(surface: str, surfaces: dict[str, str], browser: Browser) -> None:
    """The page's own name now leads to this server: for the browser both are one origin."""
    before, port = generated(surfaces), surfaces[surface].rpartition(":")[2]
    url = f"http://www.evil.example:{port}"
    got = browser.tries(url, url)
    for name in ("blob", "text", "json", "read", "page"):
        assert " 403 " in got[name], (name, got)
        assert "none of this server's" in got[name]
    assert (got["socket"], got["cockpit"]) == ("failed", "failed")
    assert generated(surfaces) == before


def test_a_page_of_this_machine_is_served(surfaces: dict[str, str], browser: Browser, site: str) -> None:
    """The tries themselves are right: a page of localhost gets its answers."""
    got = browser.tries(f"http://localhost:{site.rpartition(':')[2]}", surfaces["server"])
    assert " 200 " in got["json"]
    assert " 200 " in got["read"]
    assert got["socket"] == "open"

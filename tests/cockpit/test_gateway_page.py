"""The page of a gateway in Chromium: its replicas, one of them live, a chat through it, and a replica that goes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

pytest.importorskip("nicegui", reason="the extra `cockpit` is not installed")

from tests.cockpit.axe import problems
from tests.cockpit.browser import MISSING, Browser
from tests.e2e.live import LiveServer
from tests.gateway.services import free_port, wait_until

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    # selenium and a browser that is gone leave sockets to the collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
SERVE = ["-m", "quire.cli", "serve", "quill", "--port", "0", "--threads", "1", "--num-kv-blocks", "256"]
CONFIG = """port = 0
[health]
interval_s = 0.5
[[backends]]
name = "left"
url = "{}"
[[backends]]
name = "right"
url = "{}"
"""


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LiveServer]]:
    folder = tmp_path_factory.mktemp("replicas")
    with ExitStack() as stack:
        yield [stack.enter_context(LiveServer(SERVE, folder / name)) for name in ("left", "right")]


@pytest.fixture(scope="module")
def browser(replicas: list[LiveServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder: Path = tmp_path_factory.mktemp("gateway")
    config = folder / "gateway.toml"
    config.write_text(CONFIG.format(*(each.url for each in replicas)))
    gateway_command = ["-m", "quire.cli", "gateway", "--config", str(config)]
    with LiveServer(gateway_command, folder / "gateway.log", ready=r"gateway listening url=(\S+)") as gateway:
        wait_until(lambda: httpx.get(gateway.url + "/readyz").status_code == 200, "a ready replica")
        command = ["-m", "quire.cli", "cockpit", gateway.url, "--port", str(free_port())]
        with LiveServer(command, folder / "page.log", ready=r"cockpit  of \S+ on (\S+)") as page:
            made = Browser(page.url)
            yield made
            made.close()


def test_replicas_and_routing_are_shown(browser: Browser) -> None:
    browser.open("/cockpit/live", ".qc-gateway")
    browser.until(lambda: browser.one(".qc-gateway").text.count("ready") == 2)
    said = browser.one(".qc-replicas").text
    for word in ("Replicas", "left", "right", "Routing", "policy"):
        assert word in said
    browser.until(lambda: browser.all(".ql .tile"))  # the live page of the chosen replica
    assert problems(browser) == []
    browser.shot("gateway")


def test_a_chat_says_which_replica_answered(browser: Browser) -> None:
    browser.open("/", ".qc-write textarea")
    browser.one(".qc-write textarea").send_keys("Hello!")
    browser.click("Send")
    browser.until(lambda: browser.all(".qc-bar"))
    facts = browser.one(".qc-keys:last-child").text
    assert "backend left" in facts or "backend right" in facts


def test_a_replica_that_goes_turns_grey(browser: Browser, replicas: list[LiveServer]) -> None:
    browser.open("/cockpit/live", ".qc-gateway tr")
    browser.until(lambda: browser.one(".qc-gateway").text.count("ready") == 2)
    replicas[0].process.send_signal(signal.SIGKILL)
    replicas[0].process.wait()
    browser.until(lambda: browser.all("tr.gone"))
    assert "left" in browser.one("tr.gone").text
    browser.until(lambda: "unready for" in browser.one("tr.gone").text)
    assert browser.one(".qc-state").get_attribute("data-status") == "ready"  # the gateway has another one
    browser.shot("gateway-gone")

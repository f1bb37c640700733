"""A server that is gone, in Chromium: grey, since when, and back when it is back; nothing looks like an idle server."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nicegui", reason="the extra `cockpit` is not installed")

from tests.cockpit.browser import MISSING, Browser
from tests.e2e.live import LiveServer
from tests.gateway.services import free_port

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    # selenium and a browser that is gone leave sockets to the collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
COCKPIT = r"cockpit +of \S+ on (\S+)"
PORT = free_port()
SERVE = ["-m", "quire.cli", "serve", "quill", "--port", str(PORT), "--threads", "1", "--num-kv-blocks", "256"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    log = tmp_path_factory.mktemp("cockpit") / "log"
    command = ["-m", "quire.cli", "cockpit", f"http://127.0.0.1:{PORT}", "--port", str(free_port())]
    with LiveServer(command, log, ready=COCKPIT) as page:
        made = Browser(page.url)
        yield made
        made.close()


def status(browser: Browser) -> str | None:
    found = browser.all(".qc-state")
    return found[0].get_attribute("data-status") if found else None


def test_a_gone_server_is_grey_with_its_time(browser: Browser, tmp_path: Path) -> None:
    with LiveServer(SERVE, tmp_path / "log") as server:
        browser.open("/cockpit/live", ".ql .tile")
        browser.until(lambda: status(browser) == "ready")
        assert not browser.all(".ql.gone")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        browser.until(lambda: browser.all(".ql.gone"))
        assert "No news since" in browser.one(".qc-gone").text
        browser.until(lambda: status(browser) == "gone")
        assert "gone since" in browser.one(".qc-state").text
        filtered = "return getComputedStyle(document.querySelector('.ql .tiles')).filter"
        assert "grayscale" in browser.script(filtered)
        browser.shot("gone")
    browser.open("/cockpit/live", ".qc-state.gone")  # a page that is opened now says so too
    assert "gone since" in browser.until(lambda: browser.one(".qc-state").text)
    time.sleep(0.1)
    with LiveServer(SERVE, tmp_path / "log") as server:
        browser.until(lambda: status(browser) == "ready")
        browser.until(lambda: browser.all(".ql:not(.gone) .tile"))
    browser.errors()

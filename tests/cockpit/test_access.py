"""The pages pass axe-core, in light and in dark, and are used with the keyboard alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("nicegui", reason="the extra `cockpit` is not installed")

pytest.importorskip("selenium", reason="selenium is not installed")

from selenium.webdriver import ActionChains
from selenium.webdriver.common.keys import Keys
from tests.cockpit.axe import problems
from tests.cockpit.browser import MISSING, Browser
from tests.e2e.live import LiveServer

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    # selenium and a browser that is gone leave sockets to the collector
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
SERVE = ["-m", "quire.cli", "serve", "quill", "--port", "0", "--threads", "1", "--num-kv-blocks", "256", "--cockpit",
         "--admin-port", "0", "--admin-key", "root", "--api-key", "sk-a", "--slo", "ttft=1ms"]  # fmt: skip
PAGES = {
    "/cockpit/live": ".ql .tile.over, .ql .tile",
    "/cockpit/plan": ".qc-f-model",
    "/cockpit/simulate": ".qc-f-model",
    "/cockpit/learn": ".qc-lessons",
    "/cockpit/learn/batching": ".qc-picture section",
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with LiveServer(SERVE, tmp_path_factory.mktemp("cockpit") / "log") as server:
        made = Browser(server.url)
        yield made
        made.close()


def press(browser: Browser, *keys: str) -> None:
    ActionChains(browser.driver).send_keys(*keys).perform()


def focused(browser: Browser) -> str:
    """The text or label of the element with the focus."""
    return str(
        browser.script(
            "const e = document.activeElement; return e.getAttribute('aria-label') || e.textContent.trim()"
        )
    )


def tab_to(browser: Browser, name: str) -> None:
    """Press the Tab key until the focus is on the element of that name."""
    for _ in range(40):
        press(browser, Keys.TAB)
        if focused(browser) == name:
            return
    raise AssertionError(f"no Tab leads to {name!r}")


def test_the_login_passes_axe(browser: Browser) -> None:
    browser.open("/", ".qc-login input")
    found = problems(browser)
    press(browser, "sk-a", Keys.ENTER)  # the field has the focus
    browser.until(lambda: browser.all(".qc-write textarea"))
    assert found == []


def test_a_chat_is_led_by_the_keyboard_and_passes_axe(browser: Browser) -> None:
    browser.open("/", ".qc-write textarea")
    tab_to(browser, "Token by token")
    press(browser, Keys.SPACE)
    browser.one("body").send_keys("/")
    assert focused(browser) == "Message"
    press(browser, "Tell me a story about a fox.", Keys.ENTER)
    browser.until(lambda: browser.all(".qc-end"))
    browser.script("document.querySelector('.tok').focus()")
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "token 3" in browser.until(lambda: browser.one(".qc-probs").text)
    assert len(browser.all(".tok[tabindex='0']")) == 1
    assert problems(browser) == []


@pytest.mark.parametrize("path", PAGES)
def test_pages_pass_axe_in_light_and_dark(browser: Browser, path: str) -> None:
    browser.open(path, PAGES[path])
    for text in ("More: devices", "More: cluster", "The same in a terminal", "Operate this server"):
        for each in browser.all(".q-item"):
            if each.text.strip() == text:
                browser.script("arguments[0].click()", each)
    assert problems(browser) == []
    press(browser, "d")
    browser.until(lambda: browser.all(".body--dark"))
    found = problems(browser)
    press(browser, "d")
    browser.until(lambda: not browser.all(".body--dark"))
    assert found == []


def test_an_unknown_problem_is_an_alert(browser: Browser) -> None:
    browser.open("/cockpit/plan", ".qc-f-count input")
    browser.one(".qc-f-count input").send_keys("\ue009a\ue0000")
    browser.click("Plan", "button")
    alert = browser.until(lambda: browser.all("[role=alert]"))[0]
    assert "“Devices” = 0 must be at least 1" in alert.text
    assert problems(browser) == []

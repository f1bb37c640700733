"""Chromium without a window, driven by selenium; screenshots go to ``$QUIRE_SCREENSHOTS``, where that is set."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 60.0  # generous: the machine may be busy
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = (
    "chromium and chromedriver are not installed (make test-browser)"
    if CHROMIUM is None or DRIVER is None
    else None
)


class Browser:
    """One window. ``open`` waits for the page's first element; ``until`` waits for what a test looks for."""

    def __init__(self, base: str, width: int = 1440, height: int = 1000) -> None:
        webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
            f"--window-size={width},{height}",
        ):  # fmt: skip
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        service = webdriver.ChromeService(executable_path=DRIVER)
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.set_script_timeout(WAIT_S)
        self.base = base

    def open(self, path: str, selector: str) -> None:
        self.driver.get(self.base + path)
        self.until(lambda: self.all(selector))

    def until(self, find: Callable[[], Any]) -> Any:
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        stale = [StaleElementReferenceException]
        return WebDriverWait(self.driver, WAIT_S, 0.1, stale).until(lambda _: find())

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        return self.until(lambda: self.all(selector))[0]

    def click(self, text: str, selector: str = "button, a, .q-toggle") -> None:
        def found() -> Any:
            return next((each for each in self.all(selector) if each.text.strip() == text), None)

        self.driver.execute_script("arguments[0].click()", self.until(found))

    def script(self, code: str, *arguments: Any) -> Any:
        return self.driver.execute_script(code, *arguments)

    def errors(self) -> list[str]:
        """What the console has said that is an error, since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def hosts(self) -> set[str]:
        """The addresses that the browser has asked since the last call."""
        found = set()
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                if not url.startswith(("data:", "blob:", "about:", "chrome")):
                    found.add("/".join(url.split("/")[:3]))
        return found

    def shot(self, name: str) -> None:
        if folder := os.environ.get("QUIRE_SCREENSHOTS"):
            path = Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            self.driver.save_screenshot(str(path / f"{name}.png"))

    def close(self) -> None:
        self.driver.quit()

"""`problems`: what axe-core finds wrong with the page that a browser shows: keyboard, contrast, labels, landmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cockpit.browser import Browser

RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]
RUN = """
const [rules, done] = arguments;
axe.run(document, {runOnly: rules, resultTypes: ['violations']}).then((found) => done(found.violations.flatMap(
  (rule) => rule.nodes.map((node) => `${rule.id}: ${node.html.slice(0, 160)}: ${node.failureSummary}`))));
"""


def problems(browser: Browser) -> list[str]:
    """One line for each element that breaks a rule."""
    base = pytest.importorskip("axe_core_python.base", reason="axe-core-python is not installed")
    browser.script(base.AXE_SCRIPT)
    return list(browser.driver.execute_async_script(RUN, RULES))

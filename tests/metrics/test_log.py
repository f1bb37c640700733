"""Log lines for people and for machines."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from quire.metrics.log import Log, configure


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    logger = logging.getLogger("quire")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.level, logger.propagate = before


def test_human_lines() -> None:
    out = io.StringIO()
    configure("info", stream=out)
    log = Log("api")
    log.info("ready", url="http://127.0.0.1:1", took=1.23456, note="two words", empty="")
    log.debug("hidden", x=1)
    assert not log.debugging
    (line,) = out.getvalue().splitlines()
    assert re.fullmatch(
        r'\d\d:\d\d:\d\d INFO  api ready url=http://127.0.0.1:1 took=1.235 note="two words" empty=""', line
    )


def test_a_strangers_text_cannot_forge_a_line() -> None:
    out = io.StringIO()
    configure("info", stream=out)
    Log("api").info("refused", error="a\n12:00:00 INFO  api ready")
    assert len(out.getvalue().splitlines()) == 1


def test_json_lines_and_tracebacks() -> None:
    out = io.StringIO()
    configure("debug", stream=out, style="json")
    log = Log("engine")
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("step_failed", step=3)
    log.warning("odd")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert (first["event"], first["level"], first["name"], first["step"]) == (
        "step_failed",
        "error",
        "engine",
        3,
    )
    assert "ValueError: why" in first["traceback"]
    assert second["level"] == "warning"


def test_configuring_twice_writes_once() -> None:
    out = io.StringIO()
    configure("info", stream=io.StringIO())
    configure("info", stream=out)
    Log("api").info("once")
    assert len(out.getvalue().splitlines()) == 1

"""Log lines in both styles."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.e2e.live import LiveServer

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
    assert not log.is_debugging()
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


READY = r'"event": "ready", "url": "([^"]+)"'


@pytest.mark.slow
def test_json_logs_of_a_server_carry_request_ids(tmp_path: Path) -> None:
    flags = [
        "serve",
        "quill",
        "--port",
        "0",
        "--num-kv-blocks",
        "64",
        "--log-format",
        "json",
        "--log-level",
        "debug",
    ]
    with LiveServer(
        ["-m", "quire.cli", *flags], tmp_path / "log", ready=r'"event": "ready", "url": "([^"]+)"'
    ) as server:
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": [5], "max_tokens": 2},
                            headers={"x-request-id": "abc-1"}, timeout=60)  # fmt: skip
        assert answer.status_code == 200
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    events = {e["event"]: e for e in map(json.loads, lines)}
    assert events["request_done"]["request_id"] == "abc-1"
    assert events["request_done"]["output_tokens"] == 2

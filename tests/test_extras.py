"""An extra is imported where a setting names it; without it one line names the extra and the command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quire
from quire.cli.doctor import absent, report
from quire.errors import ConfigError
from quire.extras import EXTRAS, absent_extras, needs
from quire.metrics.trace import RequestTracer
from quire_gateway.config import GatewayArgs, GatewayConfig
from quire_gateway.ledger_database import open_database
from quire_gateway.redis_store import RedisStore
from quire_gateway.scalers import Ray
from quire_gateway.server import run_gateway

ROOT = Path(__file__).resolve().parents[1]


def hide(monkeypatch: pytest.MonkeyPatch, *extras: str) -> None:
    for extra in extras:
        for name in EXTRAS[extra].modules:
            monkeypatch.setitem(sys.modules, name, None)


def test_every_module_imports_without_any_extra() -> None:
    command = [sys.executable, "-m", "tests.plain.imports", "--together"]
    env = {**os.environ, "PYTHONPATH": str(Path(quire.__file__).parents[1])}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": 0 wrong" in done.stdout


OPENED: dict[str, Callable[[], Any]] = {
    "redis": lambda: RedisStore("redis://127.0.0.1:1", None),  # type: ignore[arg-type]
    "postgres": lambda: open_database("postgresql://127.0.0.1:1/x"),
    "ray": lambda: Ray("true", None, 1.0, 0.0),
    "otel": lambda: RequestTracer.to("http://127.0.0.1:1", float, float, "0"),
}


@pytest.mark.parametrize("extra", OPENED)
def test_a_missing_extra_is_named_with_its_command(extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, extra)
    with pytest.raises(ConfigError) as caught:
        OPENED[extra]()
    assert f"needs the extra {extra!r}" in str(caught.value)
    assert f"pip install 'quire-llm[{extra}]'" in str(caught.value)


def test_a_missing_cockpit_is_named_with_its_command() -> None:
    code = "import sys; sys.modules['nicegui'] = None\nfrom quire.cli import main\nmain()"
    command = [sys.executable, "-c", code, "cockpit", "http://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        "quire: The cockpit needs the extra 'cockpit' (no module named nicegui): "
        "run pip install 'quire-llm[cockpit]'.\n"
    )


def test_what_a_gateway_lacks_is_an_error_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hide(monkeypatch, "redis")
    config = GatewayConfig(server=GatewayArgs(port=0, redis="redis://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="needs the extra 'redis'"):
        run_gateway(config)
    (tmp_path / "file").touch()
    books = GatewayArgs(port=0, ledger=str(tmp_path / "file" / "ledger.sqlite"))
    with pytest.raises(ConfigError, match="journal"):
        run_gateway(GatewayConfig(server=books))


def test_another_error_inside_needs_is_not_a_missing_extra() -> None:
    with pytest.raises(ValueError, match="other"), needs("redis", "A test"):
        raise ValueError("other")


def test_doctor_says_which_extras_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "otel", "postgres")
    assert {"otel", "postgres"} <= set(absent_extras())
    rows = {row[0]: row[1:] for row in absent()}
    assert rows["otel"] == ("spans of requests (--otlp-traces-endpoint)", "pip install 'quire-llm[otel]'")


def test_an_extra_lacks_where_one_package_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "cockpit" in absent_extras()


def test_doctor_prints_absent_extras(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "redis")
    monkeypatch.setenv("COLUMNS", "120")
    report()
    assert "pip install 'quire-llm[redis]'" in capsys.readouterr().out

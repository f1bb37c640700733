"""An extra is imported where a setting names it; without it one line names the extra and the command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tools.gateway_demo import awaited, start
from tools.house import ROOT, declared

from quire.cli.doctor import absent, report
from quire.errors import ConfigError
from quire.extras import EXTRAS, absent_extras, install_command, needs
from quire.gateway.config import GatewayArgs, GatewayConfig
from quire.gateway.ledger_database import open_database
from quire.gateway.redis_store import RedisStore
from quire.gateway.scalers import Ray
from quire.gateway.server import run_gateway
from quire.metrics.trace import RequestTracer


def hide(monkeypatch: pytest.MonkeyPatch, *extras: str) -> None:
    for extra in extras:
        for name in EXTRAS[extra].modules:
            monkeypatch.setitem(sys.modules, name, None)


def test_extras_are_those_of_pyproject() -> None:
    groups = {name: set(modules) for name, modules in declared(ROOT).items() if name not in ("core", "dev")}
    assert {name: set(extra.modules) for name, extra in EXTRAS.items()} == groups


def test_every_module_imports_without_any_extra() -> None:
    command = [sys.executable, "-m", "tests.plain.imports", "--together"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
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
    assert f"pip install '.[{extra}]'" in str(caught.value)


def test_a_missing_cockpit_is_named_with_its_command() -> None:
    code = "import sys; sys.modules['nicegui'] = None\nfrom quire.cli import main\nmain()"
    command = [sys.executable, "-c", code, "cockpit", "http://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == (
        "quire: The cockpit needs the extra 'cockpit' (no module named nicegui): "
        "run pip install '.[cockpit]' in a clone of Quire.\n"
    )


def test_no_text_names_another_projects_distribution() -> None:
    other = "quire" + "["
    texts = [
        file
        for folder in ("src", "docs", "deploy", "tools")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".md", ".toml", ".yaml")
    ]
    named = [file.name for file in [*texts, ROOT / "README.md"] if f"'{other}" in file.read_text()]
    assert not named, f"say {install_command('EXTRA')}"


def test_what_a_gateway_lacks_is_an_error_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "redis")
    config = GatewayConfig(server=GatewayArgs(port=0, redis="redis://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="needs the extra 'redis'"):
        run_gateway(config)


def test_another_error_inside_needs_is_not_a_missing_extra() -> None:
    with pytest.raises(ValueError, match="other"), needs("redis", "A test"):
        raise ValueError("other")


def test_doctor_says_which_extras_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "otel", "postgres")
    assert {"otel", "postgres"} <= set(absent_extras())
    rows = {row[0]: row[1:] for row in absent()}
    assert rows["otel"] == ("spans of requests (--otlp-traces-endpoint)", "pip install '.[otel]'")


def test_an_extra_lacks_where_one_package_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "cockpit" in absent_extras()


def test_doctor_prints_absent_extras(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "redis")
    monkeypatch.setenv("COLUMNS", "120")
    report()
    assert "pip install '.[redis]'" in capsys.readouterr().out


def test_the_demo_ends_when_a_process_of_it_has(tmp_path: Path) -> None:
    (tmp_path / "absent.toml").write_text("no_such_key = 1\n")
    child = start(tmp_path, "gateway", ["gateway", "--config", str(tmp_path / "absent.toml")])
    with pytest.raises(SystemExit, match=r"gateway has ended with status 1:\nquire: .*no_such_key"):
        awaited(tmp_path, [child], "listening", 1)

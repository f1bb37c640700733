"""Who may never import whom, what imports without torch, and no circles."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tools.house import ROOT, files_of, import_circles, import_graph

SRC = ROOT / "src"

FILES = files_of(ROOT)


def test_contracts_between_packages_hold() -> None:
    """They stand in pyproject.toml under ``[tool.importlinter]``."""
    command = [
        str(Path(sys.executable).with_name("lint-imports")),
        str(ROOT / "pyproject.toml"),
        "--no-cache",
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(SRC)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_every_package_of_quire_is_in_a_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    sources = {name for contract in contracts for name in contract["source_modules"]}
    packages = {f"quire.{path.name}" for path in (SRC / "quire").iterdir() if (path / "__init__.py").exists()}
    # What these import is limited by the contract of `quire` alone.
    assert packages - sources == {"quire.cli", "quire.metrics", "quire.gateway", "quire.learn"}


def test_no_import_circles() -> None:
    circles = import_circles(import_graph(ROOT))
    assert not circles


def test_a_circle_is_found_wherever_the_import_stands(tmp_path: Path) -> None:
    folder = tmp_path / "src" / "quire"
    (folder / "a").mkdir(parents=True)
    (folder / "__init__.py").write_text("from quire.a import one\n")
    (folder / "a" / "__init__.py").write_text("")
    (folder / "a" / "one.py").write_text("def f():\n    from quire.a import two\n")
    (folder / "a" / "two.py").write_text("if TYPE_CHECKING:\n    from quire.three import Three\n")
    (folder / "three.py").write_text("import quire.a.one\n")
    assert import_circles(import_graph(tmp_path)) == [("quire.a.one", "quire.a.two", "quire.three")]


def modules_of(*names: str) -> list[str]:
    modules = [".".join(p.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__") for p in FILES]
    return [m for m in modules if any(m == name or m.startswith(f"{name}.") for name in names)]


TORCH_FREE = modules_of(
    *(f"quire.{name}" for name in (
        "errors", "extras", "clock", "request", "structured_outputs", "step", "weight_format", "modelspec",
        "recurrent_spec",
        "weight_plan", "weight_table", "families",
        "parallel", "config", "args", "cores", "recording_signal", "slo", "cost",
        "device", "metrics", "private", "http", "cache", "text", "resolve", "scheduler",
        "models.hub", "models.checkpoint", "lora.adapter", "executor.base",
        "engine.core", "engine.messages", "engine.client", "engine.frontend", "engine.heartbeat",
        "engine.quarantine", "engine.supervisor", "engine.process",
        "api", "jobs", "cli", "tiers",
    )),
    "quire_gateway",
    *(f"quire_lab.{name}" for name in (
        "cli", "diagnose", "plan", "sim", "workload", "bench.summary", "bench.serve", "bench.report",
    )),
)  # fmt: skip
# What a bare PyTorch container lacks.
BARE_LACKS = ["msgspec", "zmq", "llguidance", "gguf", "starlette", "uvicorn", "pydantic", "quire._native"]


def run_blocked(blocked: list[str], code: str) -> None:
    """Run ``code`` in a fresh interpreter in which importing any of ``blocked`` fails."""
    lines = ["import sys", *(f"sys.modules[{name!r}] = None" for name in blocked), code]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={"PYTHONPATH": str(SRC), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_torch_free_modules_import_without_torch() -> None:
    run_blocked(["torch", "transformers"], "\n".join(f"import {m}" for m in TORCH_FREE))


@pytest.mark.parametrize("module", ["quire", "quire.cli"])
def test_entry_points_do_not_load_torch(module: str) -> None:
    run_blocked([], f"import {module}\nassert 'torch' not in sys.modules")


def test_offline_api_imports_in_a_bare_torch_container() -> None:
    run_blocked(BARE_LACKS, "from quire import LLM, SamplingParams\nassert 'torch' in sys.modules or LLM")

"""A line of the layout may import from the lines above it, and within a line from left to right; no circles."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from tools.house import ROOT, import_circles, import_graph, parsed

SRC = ROOT / "src"

# One tuple per line of the layout, top to bottom (docs/architecture.md). A name is a module or a package of `quire`.
LINES: list[tuple[int, tuple[str, ...]]] = [
    (0, ("_native",)),
    (0, ("errors",)),
    (0, ("extras",)),
    (0, ("clock",)),
    (0, ("structured_outputs",)),
    (0, ("request",)),
    (0, ("step",)),
    (0, ("weight_format",)),
    (0, ("modelspec",)),
    (0, ("weight_plan",)),
    (0, ("families",)),
    (0, ("parallel",)),
    (0, ("config",)),
    (0, ("args",)),
    (0, ("cores", "recording_signal")),
    (1, ("device",)),
    (1, ("metrics",)),
    (1, ("private",)),
    (1, ("http",)),
    (1, ("cache",)),
    (1, ("text",)),
    (1, ("workload",)),
    (1, ("plan",)),
    (2, ("resolve",)),
    (2, ("scheduler",)),
    (3, ("kernels",)),
    (3, ("quant",)),
    (
        4,
        (
            "models.hub",
            "models.safetensors_file",
            "models.gguf_file",
            "models.weight_sources",
            "models.generation_config",
            "models.checkpoint",
        ),
    ),
    (4, ("layers", "models")),
    (5, ("lora", "sampling", "speculate", "runner")),
    (6, ("executor",)),
    (7, ("engine",)),
    (8, ("quantize", "disagg", "jobs", "gateway", "bench", "sim", "learn", "diagnose", "api")),
    (9, ("cockpit", "cli")),
]
PLACE = {name: (line, column) for line, (_, names) in enumerate(LINES) for column, name in enumerate(names)}
# (importer, imported) pairs that break the rule; this list only shrinks.
ALLOWED: set[tuple[str, str]] = set()


def place(module: str) -> str:
    """Return the entry of LINES that ``quire.<module>`` belongs to."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in PLACE:
            return name
    return ""


def imports(path: Path) -> set[str]:
    """Return the modules of quire, without the leading ``quire.``, that the file imports."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            if node.module == "quire":
                found |= {f"quire.{a.name}" for a in node.names}
            else:
                found |= {f"{node.module}.{a.name}" for a in node.names}
    return {name.removeprefix("quire.") for name in found if name.startswith("quire.")}


FILES = sorted((SRC / "quire").rglob("*.py"))


def test_arrows() -> None:
    bad = []
    for path in FILES:
        relative = path.relative_to(SRC / "quire").with_suffix("")
        own = ".".join(relative.parts).removesuffix(".__init__")
        if own == "__init__":  # the lazy names of the package
            continue
        mine = place(own)
        assert mine, f"{own} has no place in the layout: add it to LINES and to docs/architecture.md"
        for target in imports(path):
            theirs = place(target)
            if theirs in ("", mine) or (mine, theirs) in ALLOWED:
                continue
            if PLACE[theirs] > PLACE[mine]:
                bad.append(f"{own} -> {target}")
    assert not bad, "imports against the arrows:\n" + "\n".join(sorted(bad))


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
    found = []
    for path in FILES:
        module = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        short = module.removeprefix("quire.")
        if any(short == n or short.startswith(n + ".") for n in names):
            found.append(module)
    return found


TORCH_FREE = modules_of(
    *(name for rank, names in LINES if rank <= 2 for name in names if name != "_native"),
    "models.hub", "models.checkpoint", "lora.adapter",
    "executor.base",
    "engine.core", "engine.messages", "engine.client", "engine.frontend", "engine.heartbeat", "engine.quarantine",
    "engine.supervisor", "engine.process",
    "api", "jobs", "gateway", "diagnose", "bench.summary", "bench.serve", "bench.report", "sim", "cli",
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

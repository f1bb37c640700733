"""What a test costs, from what its file imports; `python -m tests.costs unit` prints the files of units.

A *unit* uses no torch, starts no process and never sleeps; `make test-unit` checks that. A *component* computes with
torch, talks over sockets within the process, or runs many whole simulations or plans. A *system* starts processes. A
mark in the file itself wins.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

COSTS = ("unit", "component", "system")
ROOT = Path(__file__).resolve().parents[1]
_MARK = r"^pytestmark = \[?[^\]=]*\bpytest\.mark\.(unit|component|system)\b"
_STARTS = {"subprocess", "multiprocessing"}
_SERVES = {"aiohttp", "httpx", "starlette", "uvicorn", "zmq"}
_OWN = {"quire", "quire_gateway", "quire_lab", "tests", "benchmarks", "tools"}
_COMPUTES = {"torch", "transformers", "triton"}


@cache
def cost_of(file: Path) -> str:
    """Return the cost that a file of tests says it has, else the one that its imports mean."""
    mark = re.search(_MARK, file.read_text(), re.MULTILINE)
    if mark is not None:
        return mark[1]
    own = {name.partition(".")[0] for name in imported(file, ROOT / "tests")}
    if own & _STARTS:
        return "system"
    if own & _SERVES or _COMPUTES & {name.partition(".")[0] for name in imported(file, ROOT)}:
        return "component"
    return "unit"


@contextmanager
def held_to_a_unit() -> Iterator[None]:
    """Fail a test that starts a process, sleeps, or has brought torch in."""

    def refuse(*args: object, **_: object) -> None:
        pytest.fail(f"a unit test starts no process and never sleeps, and this one asked for {args!r}")

    patch = pytest.MonkeyPatch()
    patch.setattr(subprocess, "Popen", refuse)
    patch.setattr(time, "sleep", refuse)
    try:
        yield
    finally:
        patch.undo()
    assert "torch" not in sys.modules, "a unit test does without torch"


@cache
def imported(file: Path, within: Path) -> frozenset[str]:
    """Return the modules that a file imports at its top, directly and through our own files below ``within``."""
    seen: set[Path] = set()
    names: set[str] = set()
    waiting = [file]
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            names |= _imports(path)
            waiting += [own for own in _own_files(path) - seen if own.is_relative_to(within)]
    return frozenset(names)


@cache
def _own_files(file: Path) -> frozenset[Path]:
    """Return our own files that a file imports, among them the packages around them."""
    modules = {
        ".".join(parts[:end])
        for parts in (name.split(".") for name in _imports(file))
        for end in range(1, len(parts) + 1)
    }
    return frozenset(path for path in map(_file_of, modules) if path is not None)


@cache
def _file_of(module: str) -> Path | None:
    if module.partition(".")[0] not in _OWN:
        return None
    for root in (ROOT / "src", ROOT):
        path = root.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return file
    return None


@cache
def _imports(file: Path) -> frozenset[str]:
    names: set[str] = set()
    waiting: list[ast.stmt] = list(ast.parse(file.read_text()).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            waiting += [*node.body, *node.orelse]
        elif isinstance(node, ast.Try | ast.With):
            waiting += node.body
    return frozenset(names)


if __name__ == "__main__":
    print(
        *(p.relative_to(ROOT) for p in sorted(ROOT.glob("tests/**/test_*.py")) if cost_of(p) == sys.argv[1])
    )

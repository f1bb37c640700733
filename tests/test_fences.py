"""Fences around what hurts: what one streamed chat request crosses, and what each entry point loads.

Every number is what `tools/walk.py` measured, and a few more for functions that run at times of their own. A number
only shrinks: a change that needs a larger one is missing a seam (docs/design.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tools.house import ROOT
from tools.walk import OFF, Walk, walk

# (files, their lines, functions that ran, their lines)
MAX_DEFAULT = (72, 15_100, 505, 5_060)
MAX_WITHOUT_OPTIONAL = (62, 13_480, 450, 4_650)
# Lines of the modules that a process has loaded when it has answered one plain request.
MAX_SERVER = 27_650
MAX_LLM = 24_700
MAX_CORE_LOOP = 18_700

CORE_LOOP = "import quire.engine.core, quire.executor.local, quire.runner.worker"
LLM = """
from quire import LLM, SamplingParams
LLM("quill").generate(["It was"], SamplingParams(max_tokens=4))
"""
LOADED = """
import json, sys
print(json.dumps([m.__file__ for n, m in list(sys.modules.items()) if n.startswith("quire") and m.__file__]))
"""


@pytest.fixture(scope="module")
def default_walk() -> Walk:
    return walk(ROOT)


def counts(crossed: Walk) -> tuple[int, int, int, int]:
    files = crossed.together
    return (
        len(files),
        crossed.num_lines(files),
        len(crossed.functions),
        crossed.num_function_lines(),
    )


def check(crossed: Walk, bars: tuple[int, int, int, int], off: Sequence[str] = ()) -> None:
    """Check a walk; on a busy machine, where what runs late counts as well, walk again."""
    for _ in range(3):
        measured = counts(crossed)
        if all(n <= bar for n, bar in zip(measured, bars, strict=True)):
            return
        crossed = walk(ROOT, off)
    raise AssertionError(
        f"(files, lines, functions, lines): {measured}, allowed {bars}: {sorted(crossed.together)}"
    )


def test_walk_of_a_server_as_it_starts_by_default(default_walk: Walk) -> None:
    check(default_walk, MAX_DEFAULT)


def test_walk_without_what_the_answer_does_not_need() -> None:
    check(walk(ROOT, OFF), MAX_WITHOUT_OPTIONAL, OFF)


def test_server_loads_no_more_than_it_did(default_walk: Walk) -> None:
    assert default_walk.num_lines(default_walk.modules["api"]) <= MAX_SERVER


@pytest.mark.parametrize(
    ("code", "bar"), [(CORE_LOOP, MAX_CORE_LOOP), (LLM, MAX_LLM)], ids=["core-loop", "llm"]
)
def test_entry_point_loads_no_more_than_it_did(code: str, bar: int, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code + LOADED],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    files = json.loads(done.stdout.splitlines()[-1])
    lines = sum(Path(file).read_text().count("\n") for file in files if file.endswith(".py"))
    assert lines <= bar
    off = (
        "/tiers",
        "/moving.py",
        "/kv_tier.py",
        "/kv_root.py",
        "/content.py",
        "/transfers.py",
        "/carried_states.py",
        "/tier_rows.py",
    )
    assert not [file for file in files if any(name in file for name in off)], "a tier is off"

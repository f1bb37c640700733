"""The declared dependencies are those that the package imports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tools.house import INDIRECT, ROOT, declared, module_of, undeclared, unused

from quire.cli.doctor import NEEDED, OPTIONAL, SERVING
from quire.extras import EXTRAS, install_command

PYPROJECT = """
[project]
dependencies = ["torch>=2", "pyzmq>=26", "never-imported"]
[project.optional-dependencies]
dev = ["pytest"]
"""


def test_every_import_is_declared() -> None:
    assert not undeclared(ROOT), "add to the dependencies of pyproject.toml"


def test_every_dependency_is_imported() -> None:
    assert not unused(ROOT), "delete from pyproject.toml, or move to the extra `dev`"


def test_indirect_dependencies_are_declared() -> None:
    assert set(INDIRECT) <= declared(ROOT)["core"]


def test_doctor_names_every_dependency() -> None:
    named = {module_of(name) for name in (*NEEDED, *SERVING, *OPTIONAL)}
    assert named == declared(ROOT)["core"]


def test_extras_are_those_of_pyproject() -> None:
    groups = {name: set(modules) for name, modules in declared(ROOT).items() if name not in ("core", "dev")}
    assert {name: set(extra.modules) for name, extra in EXTRAS.items()} == groups


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


def test_ci_tests_the_plain_install_before_dev() -> None:
    """`make dev` brings packages of the extras, with which a missing one is not seen."""
    steps = re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert steps[:3] == ["install", "test-plain", "dev"]
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"run: make (\S+)", workflow) == steps
    assert re.search(r"^test-plain: install ", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.fixture
def small_tree(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    folder = tmp_path / "src" / "quire"
    folder.mkdir(parents=True)
    (folder / "one.py").write_text("import os\nimport zmq.asyncio\nfrom torch import nn\nimport yaml\n")
    return tmp_path


def test_an_undeclared_import_is_found(small_tree: Path) -> None:
    assert undeclared(small_tree) == {"yaml"}


def test_a_dependency_without_import_is_found(small_tree: Path) -> None:
    assert unused(small_tree) == {"never_imported"}

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
    assert set(INDIRECT) <= set().union(*declared(ROOT).values())


def test_doctor_names_every_dependency() -> None:
    named = {module_of(name) for name in (*NEEDED, *SERVING, *OPTIONAL)}
    assert named == declared(ROOT)["core"]


def test_extras_are_those_of_pyproject() -> None:
    groups = {name: set(modules) for name, modules in declared(ROOT).items() if name not in ("core", "dev")}
    assert {name: set(extra.modules) for name, extra in EXTRAS.items()} == groups


# Lines that fetch the distribution `quire`, with or without options before it, an extra or a version behind it.
OTHER = re.compile(
    r"(?:uvx|pipx install|pipx run|uv tool install|uv tool run|pip install|--from)(?: -\S+)* ['\"]?quire(?![\w./-])"
)


def test_no_text_names_another_projects_distribution() -> None:
    folders = ("src", "docs", "deploy", "tools", ".github", "benchmarks", "examples")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*")] + [*ROOT.glob("*.md")]
    texts = [file for file in files if file.suffix in (".py", ".md", ".toml", ".yaml", ".yml", ".sh")]
    named = [
        f"{file.name}: {line}"
        for file in texts
        for line in file.read_text().splitlines()
        if OTHER.search(line) and "never" not in line
    ]
    assert not named, f"say {install_command('EXTRA')}"


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("uvx quire serve quill", True),
        ("pip install -q 'quire[redis]'", True),
        ("pipx install quire==0.2.0", True),
        ("uvx --from quire quire serve", True),
        ("pip install 'quire-llm[redis]'", False),
        ("uvx --from ./quire_llm-0.1.0-py3-none-any.whl quire serve", False),
        ("pipx install ./quire", False),
    ],
)
def test_lines_that_fetch_another_project_are_found(line: str, other: bool) -> None:
    assert bool(OTHER.search(line)) == other


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

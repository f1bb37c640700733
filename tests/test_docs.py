"""README and docs/ name only what exists: files, links, flags, make targets; generated tables are those of today."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import typer
import yaml

from quire import __version__
from quire.cli import app
from quire.cli.foreign import foreign_flags
from quire.cost.hardware import hardware_table
from quire.cost.presets import preset_spec
from quire.cost.split import Split
from quire.families import SUPPORTED
from quire.families.gguf_types import BLOCK_TYPES
from quire.text.output.formats import FORMATS
from quire_lab.learn.registry import SIMULATIONS
from quire_lab.plan.memory import plan_memory
from quire_lab.sim.scenario import SCENARIOS

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "benchmarks/README.md",
        ROOT / "deploy/README.md",
    ]
)
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TREES = ("src", "csrc", "tests", "tools", "benchmarks", "docs", "deploy", ".github")
TREES_OF_SRC = (SRC / "quire", SRC, SRC / "quire_lab")  # where a page's short paths begin
PACKAGES = tuple(p.name for tree in TREES_OF_SRC for p in tree.iterdir() if (p / "__init__.py").exists())


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def spans(text: str) -> Iterator[str]:
    """Each inline code span, and each line of a code block."""
    for block in re.findall(r"```[^\n]*\n(.*?)```", text, re.DOTALL):
        yield from block.splitlines()
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def anchors(text: str) -> set[str]:
    """The anchors that headings get on GitHub."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_that_a_page_names_exist(page: Path) -> None:
    tree = "|".join(re.escape(name) for name in TREES)
    paths = re.findall(rf"(?<![\w./-])(?:{tree})/[\w./-]*\w", page.read_text())
    missing = {path for path in paths if not (ROOT / path).exists() and not path.endswith("CSV")}
    assert not missing


def test_pages_that_the_code_names_exist() -> None:
    """Help, errors and comments send a reader to pages of ``docs/``; the page of another project has its address."""
    files = [
        path for folder in ("src", "tools", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.*")
    ]
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        if path.suffix in {".py", ".toml", ".md"}
        for name in re.findall(
            r"(?<![\w/])docs/[\w-]+\.md", re.sub(r'"docs" / "|DOCS / "', "docs/", path.read_text())
        )
        if not (ROOT / name).exists()
    }
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    """``kernels/linear``, ``engine/core.py`` and ``scheduler/policies/slo.SloController`` are within ``src``."""
    missing = set()
    for span in spans(page.read_text()):
        match = re.fullmatch(rf"((?:{'|'.join(PACKAGES)})(?:/\w+)+)(\.\w+)*(?:\(\))?/?", span)
        if (
            match is None or (ROOT / span).exists()
        ):  # metrics/, text/ ... may be folders of tests/ or docs/ as well
            continue
        paths = [tree / name for tree in TREES_OF_SRC for name in (match.group(1), span)]
        if not any(path.exists() or path.with_suffix(".py").exists() for path in paths):
            missing.add(span)
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_imports_that_a_page_shows_work(page: Path) -> None:
    """``from quire import LLM`` as users write it; their names stay when modules move."""
    for module, names in re.findall(
        r"^\s*from (quire[\w.]*) import ([\w, ]+)$", page.read_text(), re.MULTILINE
    ):
        for name in names.split(","):
            assert hasattr(importlib.import_module(module), name.split()[0]), f"{module}.{name}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("quire.gateway.filters", "quire_gateway.filters"),
        ("quire.learn.registry", "quire_lab.learn.registry"),
    ],
)
def test_old_names_of_what_users_import_work(old: str, new: str) -> None:
    assert importlib.import_module(old) is importlib.import_module(new)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_relative_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = page if not path else (page.parent / path)
        if not goal.exists() or (anchor and anchor not in anchors(goal.read_text())):
            broken.append(target)
    assert not broken


def flags_by_command() -> dict[str, set[str]]:
    """``quire bench serve`` -> its flags; "" -> those of all commands."""
    found: dict[str, set[str]] = {"": set()}

    def visit(command: Any, name: str) -> None:
        options = {opt for param in command.params for opt in (*param.opts, *param.secondary_opts)}
        found[name] = options | {"--help"}
        found[""] |= found[name]
        for word in command.list_commands(None) if hasattr(command, "list_commands") else ():
            visit(command.get_command(None, word), f"{name} {word}")

    visit(typer.main.get_command(app), "quire")
    controls = {control.flag for one in SIMULATIONS.values() for control in one.controls}
    found["quire learn"] |= controls
    found[""] |= controls
    return found


FLAGS = flags_by_command()
OTHERS = {flag for flags in foreign_flags().values() for flag in flags} | {
    "--max_model_len"
}  # that `serve` translates


def foreign_on(page: Path) -> set[str]:
    """Return the flags of other servers that ``page`` may name: all on the pages that compare, none elsewhere."""
    return OTHERS if page.name.startswith("from-") else set()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_that_a_page_names_exist(page: Path) -> None:
    wrong = []
    for span in spans(page.read_text()):
        for call in re.findall(r"(?:^|[\s/])(quire (?:bench \w+|\w+)[^|;&]*)", re.sub(r"\s#.*", "", span)):
            words = call.split()
            name = " ".join(words[:3] if words[1] == "bench" and len(words) > 2 else words[:2])
            flags = {re.split(r"[=\[]", word)[0] for word in words if word.startswith("--")}
            if name not in FLAGS and words[1] in {"serve", "run", "chat", "bench", "plan"}:
                wrong.append(span)
            elif name in FLAGS and flags - FLAGS[name] - foreign_on(page):
                wrong.append(f"{span}: {flags - FLAGS[name]}")
    assert not wrong


def test_the_page_of_the_command_line_names_every_command() -> None:
    head = (ROOT / "docs/cli.md").read_text().partition("\n## ")[0]
    leaves = [name for name in FLAGS if name and not any(other.startswith(f"{name} ") for other in FLAGS)]
    assert not [name for name in leaves if not re.search(rf"^    {name}\b", head, re.MULTILINE)]


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "benchmarks"], ids=named)
def test_flags_that_a_page_names_exist(page: Path) -> None:
    words = {word for span in spans(page.read_text()) for word in re.findall(r"^--[a-z][a-z0-9-]+", span)}
    assert not words - FLAGS[""] - foreign_on(page)


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", [*PAGES, *WORKFLOWS], ids=named)
def test_make_targets_that_a_file_names_exist(page: Path) -> None:
    text = page.read_text()
    calls = spans(text) if page.suffix == ".md" else text.splitlines()
    wanted = {
        word
        for call in calls
        for words in re.findall(r"(?:^|run: |\s)make ((?:[a-z][a-z-]*(?: |$))+)", re.sub(r"\s#.*", "", call))
        for word in words.split()
    }
    assert not wanted - make_targets()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_page_cites_what_a_reader_lacks(page: Path) -> None:
    assert not re.findall(r"\bDESIGN\b|\bSTYLE\b|\b[Ii]ssue \d+|\.\./shared", page.read_text())


def test_the_table_of_mutants_is_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import mutant_docs

    text = mutant_docs.PAGE.read_text()
    assert mutant_docs.page(text) == text, "run python tools/mutant_docs.py"


def test_workflows_parse_and_have_time_limits() -> None:
    for path in WORKFLOWS:
        jobs = yaml.safe_load(path.read_text())["jobs"]
        assert all("timeout-minutes" in job for job in jobs.values())


def test_the_changelog_has_this_version() -> None:
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    releases = [heading for heading in headings if heading != "Unreleased"]
    assert re.fullmatch(rf"{re.escape(__version__)} \(\d{{4}}-\d{{2}}-\d{{2}}\)", releases[0])


def test_readme_speeds_are_in_the_results() -> None:
    """Each ratio of README stands in the table of peers, and with its range in its machine's results."""
    peers = (ROOT / "benchmarks/results/cpu-peers.md").read_text()
    readme = (ROOT / "README.md").read_text()
    shown = re.findall(r"[\d.]+× \([\d.]+ … [\d.]+; \d+\)", readme)
    assert len(shown) == 13
    assert not [ratio for ratio in shown if ratio not in peers]
    rows = re.findall(r"^\|[^|]*\| (?:bf16|int8|int4) \|.*$", peers, re.MULTILINE)
    assert len(rows) == 12
    columns = (
        (3, "graniterapids", 8),
        (4, "emeraldrapids", 10),
        (5, "zen4", 8),
        (6, "zen5", 9),
        (7, "zen3", 6),
    )
    for column, machine, least in columns:
        results = (ROOT / f"benchmarks/results/cpu-{machine}-2core.md").read_text()
        cells = [re.search(r"([\d.]+×) \(([\d.]+ … [\d.]+); (\d+)\)", row.split("|")[column]) for row in rows]
        found = [cell.groups() for cell in cells if cell is not None]
        assert len(found) >= least, machine
        for ratio, spread, rounds in found:
            assert re.search(rf"\*\*{ratio}\*\* [a-z.]+ \({spread}\)", results), (machine, ratio, spread)
            assert int(rounds) >= 2


def test_readme_has_the_fidelity_and_the_speeds_of_the_results() -> None:
    results = (ROOT / "benchmarks/results/fidelity.jsonl").read_text().splitlines()
    readme, forms = (ROOT / "README.md").read_text(), ("as stored", "llama.cpp, as stored", "OpenVINO, int8")
    lines = [line for line in map(json.loads, results) if line["form"] in forms and "rounds" in line]
    assert len(lines) >= 8
    for line in lines:
        speeds = (
            f"{line['prompt_tokens_per_s']:,.0f}/{line['decode_tokens_per_s']:,.0f}/{line['kl_mean']:.4f}"
        )
        assert speeds in readme, (line["model"], line["form"])


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_every_page_is_in_the_order_of_reading() -> None:
    text = (ROOT / "docs/README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert not {name for name in pages if f"({name})" not in text}


def test_the_table_of_models_is_what_the_planner_computes() -> None:
    """GiB of weights, and of K and V per 1,000 tokens, in docs/models.md."""
    machine = hardware_table()["mi355x"]
    section = (ROOT / "docs/models.md").read_text().partition("## Which model")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.-]+)` \|(.*)\|$", section, re.MULTILINE)
    assert len(rows) == 12
    for name, cells in rows:
        load = {"kv_dtype": "bf16", "context": 1024, "max_num_batched_tokens": 2048, "max_num_seqs": 1}
        plans = [plan_memory(preset_spec(name), machine, Split(), precision=p, **load)
                 for p in ("bf16", "int8", "int4")]  # fmt: skip
        expected = [f"{plan.weights / 2**30:.1f}" for plan in plans]
        expected.append(f"{plans[0].kv_bytes_per_token * 1000 / 2**30:.2f}")
        assert [cell.strip() for cell in cells.split("|")] == expected, name


def test_readme_counts_are_those_of_the_tables() -> None:
    text = (ROOT / "README.md").read_text()
    calls = {name for name, form in FORMATS.items() if form.calls_tools}
    assert (
        f"in {len(calls - {'json', 'generic'})} model formats" in text
    )  # these are for models without a format of their own
    assert len(SUPPORTED) == 42
    assert "Forty-two architectures" in text


def test_the_table_of_gguf_types_is_that_of_the_code() -> None:
    text = (ROOT / "docs/quantization.md").read_text()
    table = text.partition("### GGUF's types")[2].partition("\n##")[0]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in table.splitlines()
        if line.startswith("| ")
    ]
    found = {}
    for names, bits, held, bits_held, _ in rows[2:]:
        for index, name in enumerate(names.split(", ")):
            found[name.lower()] = (float(bits.split(", ")[index]), held, float(bits_held))
    assert set(found) == set(BLOCK_TYPES)
    for name, form in BLOCK_TYPES.items():
        row = form.held.num_bytes(1, 4096, 2) - form.held.num_bytes(1, 0, 2)
        in_file = form.block_bytes * 8 / form.block
        assert found[name][1:] == (str(form.held), row * 8 / 4096), name
        assert abs(found[name][0] - in_file) <= 0.005, (name, in_file)


def test_the_annotated_tree_has_every_module_and_package() -> None:
    block = re.search(
        r"^src/quire/.*?^csrc/", (ROOT / "docs/design.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert block is not None
    words = set(re.findall(r"\w+", block.group()))
    assert {
        path.stem for tree in TREES_OF_SRC for path in tree.glob("[a-z]*") if path.suffix in ("", ".py")
    } <= words


def test_the_simulators_median_errors_are_those_of_its_table() -> None:
    text = (ROOT / "docs/simulator.md").read_text()
    errors: dict[str, list[list[float]]] = {}
    for row in re.findall(r"^\|[^|]*\|[^|]*\| (profile|step log) \|(.*)\|$", text, re.MULTILINE):
        errors.setdefault(row[0], []).append([float(e) for e in re.findall(r"\(([\d.]+)%", row[1])])
    for kind, said in (("profile", (14, 12, 2)), ("step log", (3, 6, 0.2))):
        medians = [median(column) for column in zip(*errors[kind], strict=True)][:3]
        assert medians == pytest.approx(said, rel=0.11)
        assert " | ".join(f"{value:g} %" for value in said) in text


def test_readme_counts_the_scenarios_and_lessons_that_ship() -> None:
    """The words stand in README's table, and each scenario in the simulator's page."""
    numbers = {
        10: "ten",
        11: "eleven",
        12: "twelve",
        15: "fifteen",
        16: "sixteen",
        17: "seventeen",
        18: "eighteen",
        19: "nineteen",
        20: "twenty",
    }
    text = (ROOT / "README.md").read_text()
    assert f"{numbers[len(SCENARIOS)]} experiments whose answers" in text
    assert f"{numbers[len(SIMULATIONS)]} simulations computed by the engine" in text
    page = (ROOT / "docs/simulator.md").read_text()
    assert not [name for name in SCENARIOS if f"`{name}`" not in page]

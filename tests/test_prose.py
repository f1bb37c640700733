"""Plain words: patterns that a native reader stumbles over, counted per folder, with allowances that only shrink."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [
    path
    for folder in ("src", "csrc", "docs", "tests", "benchmarks", "tools")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".cpp", ".h", ".md"} and "results" not in path.parts
] + [ROOT / "README.md"]

# Code is not a person: a sentence names its subject ("the scheduler", "a sequence that waits").
PERSONS = re.compile(r"\b(nobody|whoever|whomever|anybody|somebody)\b", re.IGNORECASE)
WHO = re.compile(r"\bwho\b", re.IGNORECASE)
ARCHAIC = re.compile(
    r"\b(found|knows|finds|takes|gives|costs|makes|fits|holds|reads|runs|comes|says|sees|counts|does it|do they) not\b"
    r"|\bneeds (it |them )?not\b|\bneed (it|them) not\b|\b(is|are|be) dear\b|\bdearer\b|\bat last\b"
    r"|\b(let|lets|letting) go\b|\black(s|ed|ing)? \w* ?still\b|\b(lest|whence|thereof|wherein|nought|thither)\b"
    r"|(?<!nothing )(?<!anything )(?<!all )\bbut for\b",
    re.IGNORECASE,
)
# Names that once stood for the thing (a turn's lock, a captured shape, rows without and with random numbers).
JARGON = re.compile(r"\b(Turnstile|Ears|quiet rows?|loud rows?|quiet sequences?|loud sequences?)\b")
# A reader of the repository does not have these documents.
CITED = re.compile(r"\b(DESIGN|STYLE)\b|\b[Ii]ssue #?\d+\b")

# Quotations of models' output and word lists are not prose of ours.
QUOTATIONS = {"docs/quill.md", "src/quire_lab/workload/request.py"}
# Hits that remain in each folder; lower a number when you fix some, and delete it at zero.
ALLOWED: dict[str, int] = {}


def folder_of(name: str) -> str:
    """Return the package under src, the folder under tests, or the top folder."""
    parts = name.split("/")
    if name.startswith("src/"):
        return "/".join(parts[:3]) if len(parts) > 3 else "/".join(parts[:2])
    return "/".join(parts[:2]) if parts[0] == "tests" and len(parts) > 2 else parts[0]


@cache
def hits() -> dict[str, list[str]]:
    """Return by folder each line with a pattern, as ``file:line: text``."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in TEXTS:
        name = path.relative_to(ROOT).as_posix()
        if name == "tests/test_prose.py" or name in QUOTATIONS:
            continue
        shipped = name.startswith(("src/", "csrc/"))
        patterns = [CITED, JARGON]
        if shipped or name.startswith("docs/") or name == "README.md":
            patterns += [PERSONS, ARCHAIC]
        if shipped:
            patterns.append(WHO)
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if any(pattern.search(line) for pattern in patterns):
                found[folder_of(name)].append(f"{name}:{number}: {line.strip()}")
    return found


def test_prose_names_its_subjects_in_plain_words() -> None:
    over = {folder: lines for folder, lines in hits().items() if len(lines) > ALLOWED.get(folder, 0)}
    assert not over, "\n".join(line for lines in over.values() for line in lines)


def test_no_allowance_is_left_over() -> None:
    found = hits()
    stale = {
        folder: len(found.get(folder, ())) for folder, n in ALLOWED.items() if not found.get(folder) and n
    }
    assert not stale, f"delete these allowances: {stale}"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (PERSONS, "Nobody reads it."),
        (WHO, "Who takes a tile changes no bit."),
        (ARCHAIC, "This needs it not."),
        (ARCHAIC, "A system call per chunk is dear."),
        (ARCHAIC, "The prompt but for its last token."),
        (JARGON, "It waits for the Turnstile."),
        (CITED, "as DESIGN says"),
        (CITED, "see issue 15"),
    ],
)
def test_patterns_find_what_they_name(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.search(text)


@pytest.mark.parametrize(
    "text", ["It reads nothing but ids.", "The line need not be fetched.", "It costs nothing."]
)
def test_patterns_leave_plain_english_alone(text: str) -> None:
    assert not any(pattern.search(text) for pattern in (PERSONS, WHO, ARCHAIC, JARGON, CITED))

"""Plain words: patterns that a native reader stumbles over, counted per folder, with allowances that only shrink."""

from __future__ import annotations

import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
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

# A trailing comment is a unit, a shape or a short noun phrase; a sentence stands on the line above.
MAX_TRAILING = 60
FRAGMENT = re.compile(r"(…\s*)?(of|as|and|by|that|what|which)\b", re.IGNORECASE)
DIRECTIVE = re.compile(r"noqa\b|type:|fmt:|pragma:")

# Quotations of models' output and word lists are not prose of ours.
QUOTATIONS = {"docs/quill.md", "src/quire_lab/workload/request.py"}
# Hits that remain in each folder; lower a number when you fix some, and delete it at zero.
ALLOWED: dict[str, int] = {}
# The same for trailing comments in src.
ALLOWED_TRAILING: dict[str, int] = {
    "src/quire/lora": 2,
    "src/quire_gateway": 114,
    "src/quire_gateway/cli": 2,
}


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


def trailing_comments(code: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment that follows code on its line, without those for a tool."""
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip():
            text = token.string.lstrip("#").strip()
            if not DIRECTIVE.match(text):
                yield token.start[0], text


def is_fragment(comment: str) -> bool:
    """Whether a trailing comment is too long, or goes on with a sentence that its line has not begun."""
    return len(comment) > MAX_TRAILING or FRAGMENT.match(comment) is not None


@cache
def trailing_hits() -> dict[str, list[str]]:
    """Return by folder of src each trailing comment that is a fragment, as ``file:line: text``."""
    fragments: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "src").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for number, comment in trailing_comments(path.read_text()):
            if is_fragment(comment):
                fragments[folder_of(name)].append(f"{name}:{number}: # {comment}")
    return fragments


def test_trailing_comments_are_units_and_shapes() -> None:
    over = {f: lines for f, lines in trailing_hits().items() if len(lines) > ALLOWED_TRAILING.get(f, 0)}
    assert not over, "\n".join(line for lines in over.values() for line in lines)


def test_no_allowance_for_trailing_comments_is_left_over() -> None:
    stale = [folder for folder in ALLOWED_TRAILING if not trailing_hits().get(folder)]
    assert not stale, f"delete these allowances: {stale}"


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


@pytest.mark.parametrize(
    "comment",
    [
        "of the rows of x",
        "… by index",
        "What the worker told",
        "tokens that were computed before a step " * 2,
    ],
)
def test_fragments_are_found(comment: str) -> None:
    code = f"x = 1  # {comment}\n"
    assert [is_fragment(text) for _, text in trailing_comments(code)] == [True]


@pytest.mark.parametrize(
    "line", ["x = 1  # [num_tokens, hidden_size]", "# of a whole line", 'x = "# of a text"']
)
def test_units_shapes_and_whole_lines_are_no_fragments(line: str) -> None:
    assert not any(is_fragment(text) for _, text in trailing_comments(line + "\n"))

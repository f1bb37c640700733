"""Write the table of planted faults into docs/exactness.md from `tools/mutant_table.py` (tests/test_docs.py compares).

python tools/mutant_docs.py
"""

from __future__ import annotations

from pathlib import Path

from mutant_table import MUTANTS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "exactness.md"
BEGIN, END = "<!-- mutants: begin (written by tools/mutant_docs.py) -->", "<!-- mutants: end -->"


def table() -> str:
    """Return one line per fault: what it is, and the tests that must catch it."""
    lines = ["| fault | caught by |", "|---|---|"]
    for mutant in MUTANTS:
        files = dict.fromkeys(test.partition("::")[0] for test in mutant.tests if test.startswith("tests/"))
        lines.append(f"| {mutant.fault} | {', '.join(f'`{file}`' for file in files)} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with the table of today."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))

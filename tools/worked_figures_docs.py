"""Write the last section of docs/learn.md from the table of tests/plan/test_worked_figures.py, which compares them.

python tools/worked_figures_docs.py
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "learn.md"
BEGIN = "## Worked figures\n"
HEAD = """
Texts that people learn serving from work through figures like these. Each is computed here by a call into Quire, and
`tests/plan/test_worked_figures.py` runs every call; this section is written from its table by
`python tools/worked_figures_docs.py`. The calls use that test's short names for the planner's, the scheduler's, the
cache's and the simulator's own functions.

"""
KINDS = {
    "=": "the texts are right",
    "≈": "near, for the reason given",
    "✗": "wrong, or contradicted by another text",
    "–": "no text gives a figure; computed with what they describe",
}


def page(text: str, rows: Sequence[Any]) -> str:
    """Return the page with the section of today."""
    counts = Counter(row.verdict for row in rows)
    said = "; ".join(f"**{sign}** {meaning}: {counts[sign]}" for sign, meaning in KINDS.items())
    lines = [f"{len(rows)} figures: {said}.", "", "### Where texts are wrong", "", *_table(rows, "✗")]
    lines += ["", "### All others", "", *_table(rows, "=≈–")]
    return text.partition(BEGIN)[0] + BEGIN + HEAD + "\n".join(lines) + "\n"


def _table(rows: Sequence[Any], verdicts: str) -> list[str]:
    lines = ["| | figure | exact | texts say | | call |", "|---|---|---|---|---|---|"]
    for row in rows:
        if row.verdict in verdicts:
            exact = f"{row.exact:,.10g} {row.unit}".strip()
            why = f"{row.verdict} {row.why}".strip()
            lines.append(f"| {row.id} | {row.what} | {exact} | {row.says} | {why} | `{row.call}` |")
    return lines


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.plan.test_worked_figures import ROWS

    PAGE.write_text(page(PAGE.read_text(), ROWS))

"""Sections of one Markdown file of results: each program replaces its own and leaves the others."""

from __future__ import annotations

import fcntl
import os
import re
from datetime import UTC, datetime
from pathlib import Path

from tests.e2e.live import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "faults.md"
HEAD = """# Faults: what was injected, and what the clients saw

Each section is written by the program that its first line names; where one was run again, its section was replaced.
docs/operations.md says what the server does at each fault.
"""


def write_section(title: str, command: str, text: str, path: Path = RESULTS) -> None:
    """Replace the section ``title`` of the file, or add it; ``text``: what follows the line with the command."""
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    load = os.getloadavg()[0]
    said = f"`{command}`, {day}, {os.cpu_count()} cores, load average {load:.1f} at the end."
    section = f"## {title}\n\n{said}\n\n{text.strip()}\n"
    with Path("/tmp/quire-faults-report.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = path.read_text() if path.exists() else HEAD
        head, *sections = re.split(r"(?m)^(?=## )", before)
        others = [each for each in sections if not each.startswith(f"## {title}\n")]
        made = sorted([*(each.strip() + "\n" for each in others), section])
        path.write_text("\n".join([head.strip() + "\n", *made]))


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

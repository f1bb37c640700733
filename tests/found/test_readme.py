"""Each row of the table names a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_row_names_a_test_and_every_file_a_row() -> None:
    rows = re.findall(r"`([\w/]+\.py)::(\w+)` \|$", (HERE / "README.md").read_text(), re.MULTILINE)
    for file, name in rows:
        assert f"def {name}(" in (HERE / file).read_text(), f"{file}::{name}"
    files = {path.name for path in HERE.glob("test_*.py")} - {Path(__file__).name}
    assert files <= {Path(file).name for file, _ in rows}

"""`quire kv ls | clear`: what it shows and removes, and the errors of a folder that is none."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tests.tiers.blocks import MIB, OTHER_ROOT, ROOT, keys_of, write
from typer.testing import CliRunner

from quire.cli.kv import kv_app
from quire.errors import ConfigError
from quire.tiers.disk import DiskStore


def run(*words: str) -> str:
    result = CliRunner().invoke(kv_app, [*words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout.strip()


def test_roots_are_listed_and_cleared(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with closing(DiskStore(folder, 64 * MIB, ROOT, refreshes=False)) as store:
        write(store, keys_of(30), 100_000)
    note = folder / "deadbeef" / "note.txt"
    note.parent.mkdir()
    note.write_text("not of the tier")
    with closing(DiskStore(folder, 64 * MIB, OTHER_ROOT, refreshes=False)) as store:
        write(store, keys_of(5))
        rows = [line.split() for line in run("ls", str(folder)).splitlines()]
        by_root = {row[0]: row for row in rows}
        assert by_root[ROOT][1:6] == ["3", "0", "30", "3", "3"]
        assert by_root[OTHER_ROOT][1:4] == ["1", "1", "5"], "one segment is being written"
        assert by_root["deadbeef"][1:4] == ["0", "0", "0"]
        assert rows[-1][:4] == ["4", "MiB", "in", "all;"]
    assert run("clear", str(folder), "--root", ROOT).endswith("removed 3 segments, 3 MiB")
    assert "removed 1 segments" in run("clear", str(folder))
    assert sorted(path.name for path in folder.iterdir()) == ["deadbeef", "written"]
    assert note.exists()


def test_what_is_no_folder_of_a_tier_is_refused(tmp_path: Path) -> None:
    for words in (("ls", str(tmp_path / "none")), ("clear", str(tmp_path / "none"))):
        with pytest.raises(ConfigError, match="There is no folder"):
            run(*words)
    assert not (tmp_path / "none").exists()
    (tmp_path / "deadbeef").mkdir()
    with pytest.raises(ConfigError, match="has no root 'feedbeef'; it has deadbeef"):
        run("clear", str(tmp_path), "--root", "feedbeef")
    with pytest.raises(ConfigError, match="hexadecimal"):
        run("clear", str(tmp_path), "--root", "..")

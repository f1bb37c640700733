"""What outlives the process: records that are replaced as a whole, and lines of which a crash cut the last one."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from quire.durable import Records, complete_lines, removed_on_failure, write_json

IDS = re.compile(r"r-[0-9]+")


def records(folder: Path) -> Records[dict[str, int]]:
    return Records(folder, dict[str, int], IDS)


def test_a_write_that_fails_leaves_the_old_value(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path], "no half of a file"
    assert path.stat().st_mode & 0o777 == 0o600


def test_files_of_a_failed_block_go(tmp_path: Path) -> None:
    made = [tmp_path / "a", tmp_path / "b"]
    made[0].touch()
    with pytest.raises(KeyboardInterrupt), removed_on_failure(*made):
        raise KeyboardInterrupt
    assert not made[0].exists()


def test_another_process_reads_records_in_order_of_writing(tmp_path: Path) -> None:
    before = records(tmp_path)
    for number in (2, 1):
        before.put(f"r-{number}", {"number": number})
        os.utime(tmp_path / f"r-{number}.json", ns=(0, 9 - number))
    before.put("r-3", {"number": 0})
    before.delete("r-3")
    before.delete("r-4")
    later = records(tmp_path)
    assert list(later.all()) == [("r-2", {"number": 2}), ("r-1", {"number": 1})]
    assert later.get("r-1") == {"number": 1}
    assert later.get("r-3") is None


def test_a_record_that_cannot_be_read_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = records(tmp_path)
    folder.put("r-1", {"number": 1})
    (tmp_path / "r-2.json").write_text('{"number": ')
    assert list(folder.all()) == [("r-1", {"number": 1})]
    assert (tmp_path / "r-2.json").exists(), "a person may mend it"
    assert [record.getMessage() for record in caplog.records] == ["record_unreadable"]


@pytest.mark.parametrize("stranger", ["notes", "../secret", "r-1/../../secret", "r-x", ""])
def test_only_files_with_an_id_are_records(tmp_path: Path, stranger: str) -> None:
    folder = records(tmp_path / "folder")
    (tmp_path / "secret.json").write_text('{"number": 1}')
    (tmp_path / "folder" / "notes.json").write_text('{"number": 1}')
    assert folder.get(stranger) is None
    assert list(folder.all()) == []


@pytest.mark.parametrize("torn", [b"", b"x", b'{"number": 1'])
def test_a_line_that_a_crash_cut_goes_from_the_file(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"head\n[1]\n[2]\n" + torn)
    with path.open("r+b") as file:
        head = file.readline()
        assert complete_lines(file.fileno(), file.read()) == [b"[1]", b"[2]"]
    assert head == b"head\n"
    assert path.read_bytes() == b"head\n[1]\n[2]\n"

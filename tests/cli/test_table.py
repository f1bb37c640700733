"""The table of commands: each name leads somewhere, and `quire keys` does what it says."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cli.keys import keys_app
from quire.cli.table import TABLE
from quire.errors import ConfigError
from quire.http.keys import read_keys


@pytest.mark.parametrize("target", TABLE.values())
def test_each_target_is_a_module_of_a_tree(target: str) -> None:
    module, _, name = target.partition(":")
    found = find_spec(module)
    assert found is not None
    assert found.origin is not None
    text = Path(found.origin).read_text()
    assert f"def {name}(" in text or f"\n{name} = " in text


def run(*words: str) -> str:
    result = CliRunner().invoke(keys_app, [*words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout.strip()


def test_keys_are_made_listed_rotated_and_revoked(tmp_path: Path) -> None:
    file = ("--file", str(tmp_path / "keys"))
    first = run("create", "alice", "--tenant", "lab", "--model", "llama-*", "--expires", "2020-01-01", *file)
    run("create", "bob", "--admin", *file)
    rows = [line.split() for line in run("list", *file).splitlines()]
    assert rows[1][:2] == ["alice", "lab"]
    assert "(expired)" in rows[1]
    assert rows[2][:2] == ["bob", "bob"]
    assert rows[2][-1] == "admin"
    second = run("rotate", "alice", *file)
    table = read_keys(tmp_path / "keys")
    assert table.find(first.encode()) is None
    kept = table.find(second.encode())
    assert kept is not None
    assert (kept.name, kept.models) == ("alice", ("llama-*",))
    assert run("revoke", "alice", *file) == "alice: revoked"
    assert [key.name for key in read_keys(tmp_path / "keys").keys.values()] == ["bob"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("create", "a b"), "name"),
        (("create", "alice", "--weight", "0"), "--weight"),
        (("create", "alice", "--expires", "soon"), "--expires"),
        (("rotate", "nobody"), "nobody"),
        (("revoke", "nobody"), "nobody"),
    ],
)
def test_a_wrong_word_is_named(words: tuple[str, ...], text: str, tmp_path: Path) -> None:
    run("create", "carol", "--file", str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match=text):
        run(*words, "--file", str(tmp_path / "keys"))

"""Flags, TOML keys, defaults and documentation are one table."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from quire.args import EngineArgs, ServerArgs, flag_name, rare_names
from quire.cli import app
from quire.cli.flags import pick, read_toml, with_model
from quire.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
BOTH: tuple[type[EngineArgs] | type[ServerArgs], ...] = (EngineArgs, ServerArgs)


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_docs_are_what_the_flags_say() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == load_tool("cli_docs").document(), (
        "python tools/cli_docs.py > docs/cli.md"
    )


@pytest.mark.parametrize(
    ("command", "kinds"), [("serve", BOTH), ("run", (EngineArgs,)), ("chat", (EngineArgs,))]
)
def test_help_shows_what_many_need_and_help_all_the_rest(command: str, kinds: tuple[type, ...]) -> None:
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    plain, every = (runner.invoke(app, [command, option]) for option in ("--help", "--help-all"))
    assert plain.exit_code == every.exit_code == 0
    for kind in kinds:
        for spec in fields(kind):
            if spec.name != "model":
                assert f"{flag_name(spec.name)} " in every.output.replace("/", " ")
                assert (f"{flag_name(spec.name)} " in plain.output.replace("/", " ")) == (
                    spec.name not in rare_names()
                )


def test_toml_keys_are_the_flags_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text('model = "quill"\n[scheduling]\nmax_num_seqs = 4\ngate = "static"\n[server]\nport = 0\n')
    settings = read_toml(path, BOTH) | {"max_num_seqs": 8}
    assert pick(EngineArgs, settings) == EngineArgs(model="quill", max_num_seqs=8, gate="static")
    assert pick(ServerArgs, settings).port == 0
    assert with_model("other", settings)["model"] == "other"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq = 4", "unknown setting 'max_num_seq' \\(did you mean 'max_num_seqs'"),
        ("max_num_seqs = [", "not valid TOML"),
        ("max_num_seqs = 'many'", "must be of type int"),
        ("port = 70000", "must be at most 65535"),
    ],
)
def test_bad_toml_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)

    def load() -> tuple[EngineArgs, ServerArgs]:
        settings = read_toml(path, BOTH)
        return pick(EngineArgs, settings), pick(ServerArgs, settings)

    with pytest.raises(ConfigError, match=message):
        load()


def test_missing_toml_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read"):
        read_toml(tmp_path / "none.toml", BOTH)

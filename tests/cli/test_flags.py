"""Flags, TOML keys, defaults and documentation are one table."""

from __future__ import annotations

import importlib.util
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from quire.args import EngineArgs, ServerArgs, flag_name, make_args, rare_names, settings_of
from quire.cli import app
from quire.cli.command import PANELS
from quire.cli.flags import ChatArgs, RunArgs, pick, read_toml, with_model
from quire.errors import ConfigError
from quire_lab.quantize.args import QuantizeArgs

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


def helped(*arguments: str, columns: int = 200) -> str:
    result = CliRunner(env={"COLUMNS": str(columns), "TERM": "dumb"}).invoke(app, arguments)
    assert result.exit_code == 0
    return result.output.replace("/", " ")


@pytest.mark.parametrize(
    ("command", "kinds"), [("serve", BOTH), ("run", (EngineArgs, RunArgs)), ("chat", (EngineArgs, ChatArgs))]
)
def test_help_shows_what_many_need_and_help_all_the_rest(command: str, kinds: tuple[type, ...]) -> None:
    plain, every = helped(command, "--help"), helped(command, "--help-all")
    shown = [spec.name for kind in kinds for spec in fields(kind) if f"{flag_name(spec.name)} " in plain]
    if command == "serve":
        assert {spec.name for kind in kinds for spec in fields(kind)} - {*shown, "model"} == rare_names()
        assert "tensor_parallel_size" in shown
    else:
        assert len(shown) == 10
    for kind in kinds:
        for spec in settings_of(kind).values():
            if spec.name != "model":
                assert f"{flag_name(spec.name)} " in every
    assert "A GPU that can, else the CPU" in plain  # short
    assert "interpret: a GPU's kernels in Triton's interpreter" in every


def test_help_of_serve_has_sixty_lines_on_eighty_columns() -> None:
    assert len(helped("serve", "--help", columns=80).splitlines()) <= 60


def test_help_lists_commands_in_groups_those_of_the_first_hour_first() -> None:
    output = helped("--help", columns=80)
    places = [output.index(f" {name} ") for names in PANELS.values() for name in names]
    assert places == sorted(places)
    assert next(iter(PANELS.values())) == ("serve", "run", "chat", "doctor")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve --modle quill", "No such option: --modle. Did you mean --model?"),
        ("serve --model-pth quill", "Did you mean --model-path?"),
        ("serve --max_num_seq 4", "Did you mean --max-num-seqs?"),
        ("chat --modle quill", "No such option: --modle. The model is an argument: quire chat MODEL"),
        ("bench serve --ulr x", "Did you mean --url?"),
        ("keys list --fil x", "Did you mean --file?"),
        ("--versoin", "Did you mean --version?"),
        ("run --zzzz", "No such option: --zzzz."),
    ],
)
def test_an_unknown_option_names_the_nearest(line: str, message: str) -> None:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, line.split(), prog_name="quire")
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("quire do", ["doctor"]),
        ("quire serve --tensor-parallel-l", ["--tensor-parallel-layout"]),  # of --help-all
        ("quire serve --order d", ["deadline"]),
    ],
)
def test_shells_complete_commands_options_and_values(words: str, offered: list[str]) -> None:
    variables = {"_QUIRE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner(env=variables).invoke(app, [], prog_name="quire")
    assert result.output.split() == offered


@pytest.mark.parametrize("kind", [EngineArgs, ServerArgs, QuantizeArgs])
def test_every_choice_of_a_setting_is_accepted(kind: type[EngineArgs | ServerArgs | QuantizeArgs]) -> None:
    """Of one that may be left open, too, such as ``--gguf-type``."""
    for spec in settings_of(kind).values():
        for choice in spec.choices:
            assert getattr(make_args(kind, {spec.name: choice}, origin="flag"), spec.name) == choice
        if spec.choices and spec.name != "model":
            with pytest.raises(ConfigError, match=f"must be one of {spec.choices[0]}"):
                make_args(kind, {spec.name: "no such choice"}, origin="flag")


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

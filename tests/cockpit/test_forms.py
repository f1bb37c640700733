"""The forms' flags are those of the command line, and what they run is what a terminal prints."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("nicegui", reason="the extra `cockpit` is not installed")

from quire.cli.cockpit import HIDDEN, commands_of
from quire.cockpit.forms import Commands, arguments_of, command_line, printed
from quire.executor.child_process import child_environment

COMMANDS = msgspec.json.decode(commands_of(local=True), type=Commands)


def terminal(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "quire.cli", *arguments],
        capture_output=True,
        text=True,
        env=child_environment() | {"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"},
    ).stdout


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_a_form_has_every_flag_of_its_command(command: str) -> None:
    said = terminal(command, "--help-all")
    flags = {flag.flag for flag in COMMANDS.flags[command] if flag.flag}
    for flag in flags:
        assert flag in said
    words = set(re.findall(r"^│ (--[\w-]+)", said, re.MULTILINE))
    assert words == flags | (words & {"--" + name.replace("_", "-") for name in HIDDEN})


def test_only_what_is_filled_in_is_an_argument() -> None:
    values = {"model": "llama-3.1-8b", "gpu": "h100", "count": "", "explain": True, "cpu": False}
    arguments = arguments_of(COMMANDS.flags["plan"], values)
    assert arguments == ["llama-3.1-8b", "--gpu", "h100", "--explain"]
    assert command_line("plan", arguments) == "quire plan llama-3.1-8b --gpu h100 --explain"


def test_a_flag_that_is_on_is_turned_off_by_its_negative() -> None:
    flags = COMMANDS.flags["simulate"]
    assert arguments_of(flags, {"enable_prefix_caching": True}) == []
    assert arguments_of(flags, {"enable_prefix_caching": False}) == ["--no-prefix-caching"]


def test_a_form_prints_what_the_terminal_prints() -> None:
    arguments = ["llama-3.1-8b", "--gpu", "h100"]
    assert asyncio.run(printed("plan", arguments, local=True)) == terminal("plan", *arguments).rstrip()


def test_a_remote_page_names_no_file_of_the_server(tmp_path: Path) -> None:
    said = asyncio.run(printed("plan", [str(tmp_path), "--gpu", "h100"], local=False))
    assert "only a page on 127.0.0.1" in said

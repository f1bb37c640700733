"""A coding agent, started by `quire launch` without a person: ``agent_client.py NAME``.

It gives one answer, and one after a call of its own tool: the scripted server repeats a call that stands in the prompt,
and then says what the tool said. Runs beside the repository; the agent is a program that npm installed (AGENT_BIN), in
a home and a folder of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from check import SCRIPTED, check

NAME = sys.argv[1]
HOME = Path(tempfile.mkdtemp(prefix="agent-"))
WORK = HOME / "work"
NOTE = "The weather in Zürich is 12 °C"
# What makes each answer one prompt and end, and its own tool that reads a file, or runs a command.
RUN = {
    "claude-code": (["-p"], "Read", {"file_path": str(WORK / "a.txt")}),
    "codex": (
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
        "exec_command",
        {"cmd": "cat a.txt"},
    ),
    "opencode": (["run"], "read", {"filePath": str(WORK / "a.txt")}),
    "qwen-code": (["--yolo", "-p"], "read_file", {"file_path": str(WORK / "a.txt")}),
    "continue": (["--config", str(HOME / "config.yaml"), "-p"], "Read", {"filepath": str(WORK / "a.txt")}),
}


def said(prompt: str) -> str:
    """Return what the agent prints for a prompt."""
    arguments, _, _ = RUN[NAME]
    env = {"PATH": f"{os.environ['AGENT_BIN']}:{os.environ['PATH']}", "HOME": str(HOME), "LANG": "C.UTF-8",
           "NO_PROXY": "127.0.0.1", "PYTHONPATH": os.environ["QUIRE_PATH"]}  # fmt: skip
    start = [sys.executable, "-m", "quire.cli", "launch", NAME, "--url", SCRIPTED, "--"]
    if NAME == "continue":  # has a file in place of variables
        start = ["cn"]
    is_read = NAME == "opencode"  # from standard input: an argument with spaces gets quotes around it
    words = [*start, *arguments] if is_read else [*start, *arguments, prompt]
    done = subprocess.run(
        words, env=env, cwd=WORK, input=prompt if is_read else "", capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-500:]
    return done.stdout


WORK.mkdir()
(WORK / "a.txt").write_text(NOTE + "\n")
(HOME / "config.yaml").write_text(
    "name: local\nversion: 1.0.0\nschema: v1\nmodels:\n  - {name: quill, provider: openai, model: quill, "
    f"apiBase: {SCRIPTED}/v1, apiKey: none}}\n"
)


@check("one answer")
def _() -> None:
    text = said("Say hello")
    assert "Hello." in text, text[-500:]


@check("a call of the agent's own tool, its result, the answer")
def _() -> None:
    _, tool, arguments = RUN[NAME]
    text = said("CALL " + json.dumps({"name": tool, "arguments": arguments}))
    assert "It is " in text, text[-500:]
    assert NOTE in text, text[-500:]

"""Where only Python is: no native extension, nothing of Linux. A stand-in for macOS, where no test of ours runs."""

from __future__ import annotations

from pathlib import Path

import httpx
from tests.e2e.live import LiveServer

# Imported by Python itself at the start of each process, the engine's too.
HIDES = """
import os, pathlib, sys
sys.modules["quire._native"] = None
del os.sched_getaffinity, os.sched_setaffinity
read_text = pathlib.Path.read_text
def only_files(path, *args, **kwargs):
    if str(path).startswith(("/proc", "/sys")):
        raise FileNotFoundError(str(path))
    return read_text(path, *args, **kwargs)
pathlib.Path.read_text = only_files
"""


def test_pure_python_serves(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDES)
    root = Path(__file__).resolve().parents[2]
    env = {"PYTHONPATH": f"{tmp_path}:{root / 'src'}:{root}"}
    command = ["-m", "quire.cli", "serve", "quill-draft", "--port", "0", "--num-kv-blocks", "64"]
    with LiveServer(command, tmp_path / "log", env=env) as live:
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(live.url + "/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        log = live.log.read_text()
        assert "The native extension is not built" in log
        assert live.stop() == 0, live.log.read_text()

"""The server of the load test: Quire's own API process over the scripted engine.

python -m benchmarks.api_load.server MODEL API_CORE ENGINE_CORE TOKENS_PER_S DIRECTORY
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from quire.api.app import create_app
from quire.api.server import run
from quire.api.settings import ApiSettings
from quire.args import EngineArgs
from quire.clock import WallClock
from quire.device import detect_device
from quire.engine.assemble import configure, load_text
from quire.engine.frontend import Frontend
from quire.engine.process import ProcessClient


class ScriptedProcess:
    """`quire.engine.spawn.EngineProcess`, but of `benchmarks.api_load.engine`."""

    def __init__(self, directory: Path, core: str, tokens_per_s: str) -> None:
        self.directory = directory
        self.life, theirs = socket.socketpair()
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.api_load.engine", str(theirs.fileno()), str(directory), core,
                 tokens_per_s],
                pass_fds=[theirs.fileno()],
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._popen.pid

    def fate(self) -> str:
        return f"exited with status {self._popen.wait(timeout=5.0)}"

    def close(self) -> None:
        self.life.close()
        self._popen.wait(timeout=10.0)


def main(model: str, api_core: str, engine_core: str, tokens_per_s: str, directory: str) -> int:
    config, checkpoint = configure(EngineArgs(model=model, kv_memory="64MiB"), detect_device())
    process = ScriptedProcess(Path(directory), engine_core, tokens_per_s)
    os.sched_setaffinity(0, {int(api_core)})
    text = load_text(EngineArgs(model=model), config, checkpoint, names=("load",))
    client = ProcessClient(config, process=process)  # type: ignore[arg-type]
    frontend = Frontend(client, text.tokenizer, text.chat_template, text.model, WallClock())
    return run(
        create_app(frontend, ApiSettings()),
        port=0,
        on_ready=lambda url, info: print(url, flush=True),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

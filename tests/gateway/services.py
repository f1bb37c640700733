"""Real Redis and PostgreSQL servers for tests, started from installed programs and ended by their process ids."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

START_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(ready: Callable[[], bool], what: str, limit_s: float = START_S) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        assert time.monotonic() < deadline, f"{what} took more than {limit_s:.0f} s"
        time.sleep(0.02)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Redis:
    """A Redis server without persistence. `stop` and `cont` freeze and thaw it; `kill` ends it at once."""

    def __init__(self, program: str) -> None:
        self._program = program
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        flags = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen([self._program, *flags], stdout=subprocess.DEVNULL, cwd="/tmp")
        wait_until(lambda: _listens(self.port), "the start of Redis")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


class Postgres:
    """A PostgreSQL cluster in a temporary folder. Its programs refuse root, so root starts them as `postgres`."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs = programs
        self._data = folder / "data"
        self._as = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        if self._as:
            shutil.chown(folder, "postgres", "postgres")
        self.port = free_port()
        user = "postgres" if self._as else os.environ.get("USER", "postgres")
        self.url = f"postgresql://{user}@127.0.0.1:{self.port}/postgres"
        self._folder = folder
        self._run("initdb", "-D", str(self._data), "-A", "trust", "-N")
        self.start()

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as, str(self._programs / program), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=self._folder, timeout=START_S)
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
        log = str(self._folder / "log")
        self._run("pg_ctl", "-D", str(self._data), "-o", options, "-l", log, "-w", "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "stop")


@contextmanager
def redis_server() -> Iterator[Redis]:
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("no redis-server on this machine (`make services` installs it)")
    server = Redis(program)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def postgres_server() -> Iterator[Postgres]:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    path = found[-1] if found else Path(shutil.which("initdb") or "/nowhere")
    if not path.exists():
        pytest.skip("no PostgreSQL server on this machine (`make services` installs it)")
    with tempfile.TemporaryDirectory(prefix="quire-postgres-") as folder:
        server = Postgres(path.parent, Path(folder))
        try:
            yield server
        finally:
            server.stop()

"""Start every command that serves, in an install without [dev], and ask each one question: `make test-plain`.

Needs no pytest and no client, which such an install lacks. Each command runs in a folder of its own as a user types it,
with the packages of every extra blocked in it and in the processes that it starts; a gateway and a server with its
cockpit also as installed. Every module is imported with each extra blocked (`tests.plain.imports`). Prints what it
started, what it asked and what came back; exit status 1 names what failed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.extras import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
QUIRE = str(Path(sys.executable).with_name("quire"))
START_S, ANSWER_S, STOP_S = 120.0, 60.0, 30.0
STOPPED = (0, 128 + signal.SIGINT)  # exit statuses: after a drain, and of what has none
BESIDE = 2  # cases at a time
BLOCKER = f"""
import sys
for name in {sorted({name for extra in EXTRAS.values() for name in extra.modules})}:
    sys.modules[name] = None
"""
PROMPT = {"prompt": "It was a dark and", "max_tokens": 8, "seed": 7}


class Failed(Exception):
    """A command did not start, or did not answer as it should."""


@dataclass(slots=True)
class Place:
    """Where one case runs: its folder, its environment, the processes that it started."""

    folder: Path
    env: dict[str, str]
    processes: list[subprocess.Popen[bytes]]

    def start(self, *arguments: str) -> str:
        """Start `quire` with ``arguments``; return its address once `/readyz` answers 200 there.

        Raises:
            Failed: it ended, or was not ready in time. Has its output.
        """
        path = self.folder / f"{len(self.processes)}.log"
        with path.open("wb") as out:
            command = [QUIRE, *arguments]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder, env=self.env
            )
        self.processes.append(process)
        end = time.monotonic() + START_S
        while time.monotonic() < end and process.poll() is None:
            output = path.read_text(errors="replace")
            url = re.search(
                r"^(?:ready|gateway|cockpit) .* on (http://127\.0\.0\.1:\d+)", output, re.MULTILINE
            )
            if url is not None and is_ready(url[1] + ("/" if arguments[0] == "cockpit" else "/readyz")):
                return url[1]
            time.sleep(0.1)
        state = "was not ready in time" if process.returncode is None else f"ended with {process.returncode}"
        raise Failed(f"`quire {' '.join(arguments)}` {state}:\n{path.read_text(errors='replace')}")

    def stop(self) -> None:
        """Stop what was started, the last first.

        Raises:
            Failed: a process did not end in time, or had ended by itself.
        """
        wrong = []
        for process in reversed(self.processes):
            process.send_signal(signal.SIGINT)
            try:
                if process.wait(STOP_S) not in STOPPED:
                    wrong.append(f"exit status {process.returncode}")
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                wrong.append(f"no end within {STOP_S:.0f} s")
        if wrong:
            logs = "\n".join(log.read_text(errors="replace") for log in sorted(self.folder.glob("*.log")))
            raise Failed(f"on SIGINT: {', '.join(wrong)}\n{logs}")


def is_ready(url: str) -> bool:
    try:
        return fetch(url)[0] == 200
    except OSError:
        return False


def fetch(url: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        return response.status, response.read()


def ask(url: str, model: str = "quill") -> str:
    """Ask for a completion; return what was asked and answered in a line."""
    _, answer = fetch(f"{url}/v1/completions", {"model": model, **PROMPT})
    choice = json.loads(answer)["choices"][0]
    if not choice["text"]:
        raise Failed(f"{model} at {url} answered without text: {answer!r}")
    return f"{model}: {PROMPT['prompt']!r} … {choice['text']!r}"


def serve(place: Place) -> list[str]:
    return [ask(place.start("serve", "quill", "--port", "0", "--threads", "1"))]


def replicas(place: Place) -> list[str]:
    return [ask(place.start("serve", "quill", "--port", "0", "--threads", "1", "--replicas", "2"))]


def two_models(place: Place) -> list[str]:
    url = place.start("serve", "quill", "small=quill-draft", "--port", "0", "--threads", "1")
    return [ask(url), ask(url, "small")]


def gateway(place: Place) -> list[str]:
    behind = place.start("serve", "quill", "--port", "0", "--threads", "1")
    (place.folder / "gateway.toml").write_text(f'port = 0\n[[backends]]\nurl = "{behind}"\n')
    return [ask(place.start("gateway", "--config", "gateway.toml"))]


def cockpit(place: Place) -> list[str]:
    behind = place.start("serve", "quill", "--port", "0", "--threads", "1", "--cockpit")
    alone = place.start("cockpit", behind, "--port", str(free_port()))
    return [ask(behind), *(page(url) for url in (behind, alone))]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def page(url: str) -> str:
    """Fetch the page, once its process is up."""
    end = time.monotonic() + START_S
    while b"/_nicegui/" not in (text := fetch(url + "/")[1]):
        if time.monotonic() > end:
            raise Failed(f"{url}/ is not the page: {text[:500]!r}")
        time.sleep(0.1)
    return f"{url}/ is the page, {len(text)} bytes"


def demo(place: Place) -> list[str]:
    command = [sys.executable, str(ROOT / "tools" / "gateway_demo.py")]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=place.folder, env=place.env, timeout=2 * START_S
    )
    if done.returncode:
        raise Failed(f"tools/gateway_demo.py ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.splitlines()


def doctor(place: Place) -> list[str]:
    """Prove that the extras are blocked where they should be: `quire doctor` misses each."""
    env = place.env | {"COLUMNS": "200"}
    done = subprocess.run(
        [QUIRE, "doctor"], capture_output=True, text=True, cwd=place.folder, env=env, check=True
    )
    absent = re.findall(r"pip install 'quire-llm\[(\w+)\]'", done.stdout)
    if "PYTHONPATH" in env and absent != [*EXTRAS]:
        raise Failed(f"not all extras are blocked: `quire doctor` misses {absent}")
    return [f"absent extras: {', '.join(absent) or 'none'}"]


def imports(place: Place) -> list[str]:
    command = [sys.executable, "-m", "tests.plain.imports"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=2 * START_S)
    if done.returncode:
        raise Failed(f"{done.stdout}{done.stderr}")
    return done.stdout.splitlines()


COMMANDS = (serve, replicas, two_models)
# (what, whether the extras are blocked); the longest first
CASES: tuple[tuple[Callable[[Place], list[str]], bool], ...] = (
    *(
        (command, True) for command in (demo, *reversed(COMMANDS), doctor)
    ),  # the demo has a gateway and replicas
    (cockpit, False),
    *((command, False) for command in (imports, gateway, doctor)),
)


def run(case: Callable[[Place], list[str]], is_blocked: bool) -> bool:
    """Run one case and print what it started and asked; return whether it did as it should."""
    name = f"{case.__name__.replace('_', ' ')}, {'every extra blocked' if is_blocked else 'as installed'}"
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="quire-plain-") as folder:
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        if is_blocked:
            (Path(folder) / "block").mkdir()
            (Path(folder) / "block" / "sitecustomize.py").write_text(BLOCKER)
            env["PYTHONPATH"] = str(Path(folder) / "block")
        place = Place(Path(folder), env, [])
        lines, wrong = [], []
        for step in (lambda: lines.extend(case(place)), place.stop):
            try:
                step()
            except Exception as error:  # whatever it is, the other cases are tried, and this one has failed
                wrong.append(str(error) if isinstance(error, Failed) else traceback.format_exc())
        lines += [line for text in wrong for line in text.splitlines()]
    started = [f"quire {' '.join(map(str, process.args[1:]))}" for process in place.processes]  # type: ignore[index]
    verdict = "FAILED: " if wrong else ""
    text = "".join(f"\n    {line}" for line in [*started, *lines])
    print(f"{verdict}{name} ({time.monotonic() - begin:.1f} s){text}", flush=True)
    return not wrong


def main() -> int:
    wanted = sys.argv[1:]
    cases = [case for case in CASES if not wanted or case[0].__name__ in wanted]
    begin = time.monotonic()
    with ThreadPoolExecutor(BESIDE) as pool:
        good = list(pool.map(lambda case: run(*case), cases))
    print(f"{sum(good)} of {len(good)} as they should be, in {time.monotonic() - begin:.0f} s")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())

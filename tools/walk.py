"""The files that a streamed chat request crosses: `python tools/walk.py [TREE …]` (default: this tree).

Starts `quire serve quill` of each tree with a profiler in every process, warms it up, traces one streamed chat request
from its first byte to its last, and prints the files of `src/quire` in which a function ran, by process: the API
process, the engine, and helpers. Files that only hold constants or types that are not called do not count.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 120
BODY = {
    "model": "quill",
    "messages": [{"role": "user", "content": "Tell me a story."}],
    "max_tokens": 24,
    "temperature": 0.7,
    "seed": 7,
    "stream": True,
    "stream_options": {"include_usage": True},
}
# Every interpreter with this file on its path runs it when it starts. The profiler notes the module of each call while
# the first byte of the file "switch" is 1; code that `dataclass` generates has no file, but the globals of its module.
SITE = """
import mmap, os, sys, threading
folder = {folder!r}
sys.meta_path[:] = [finder for finder in sys.meta_path if "_editable_" not in type(finder).__module__]
switch = mmap.mmap(os.open(folder + "/switch", os.O_RDWR), 1)
seen = set()

def note(frame, event, argument):
    if event == "call" and switch[0]:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("quire") and name not in seen:
            seen.add(name)
            path = getattr(sys.modules.get(name), "__file__", name)
            with open(folder + "/" + str(os.getpid()), "a") as out:
                out.write(path + "\\n")

threading.setprofile(note)
sys.setprofile(note)
"""


def walk(tree: Path) -> dict[str, list[str]]:
    """Return process → the files below `src/quire` that the request crossed in it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        switch = folder / "switch"
        switch.write_bytes(b"\0")
        (folder / "sitecustomize.py").write_text(SITE.format(folder=str(folder)))
        with (folder / "log").open("wb") as log:
            server = start(tree, folder, log)
            try:
                url = wait_for_url(server, folder / "log")
                for _ in range(3):
                    ask(url)
                # In place: to cut the file to nothing, even for a moment, would take the page from under the servers.
                with switch.open("r+b", buffering=0) as byte:
                    byte.write(b"\1")
                    ask(url)
                    byte.seek(0)
                    byte.write(b"\0")
            finally:
                server.terminate()
                server.wait(TIMEOUT_S)
        crossed: dict[str, list[str]] = {}
        for file in sorted(path for path in folder.iterdir() if path.name.isdigit()):
            process = "api" if int(file.name) == server.pid else f"engine or helper {file.name}"
            names = {str(Path(line).relative_to(tree / "src" / "quire")) for line in file.read_text().split()}
            crossed[process] = sorted(names)
        return crossed


def start(tree: Path, folder: Path, log: object) -> subprocess.Popen[bytes]:
    own = tree / ".venv" / "bin" / "python"
    path = os.pathsep.join((str(folder), str(tree / "src")))
    command = [
        str(own) if own.exists() else sys.executable,
        "-m",
        "quire.cli",
        "serve",
        "quill",
        "--port",
        "0",
    ]
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=tree)  # type: ignore[call-overload,no-any-return]


def wait_for_url(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if found := re.search(r"^ready\b.* on (http://\S+)$", log.read_text(), re.MULTILINE):
            return found[1]
        if server.poll() is not None:
            break
        time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def ask(url: str) -> None:
    """Send the request and read its answer to the last byte."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(BODY).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        assert b"[DONE]" in answer.read()


def main() -> None:
    counts = []
    for tree in [Path(name).resolve() for name in sys.argv[1:]] or [ROOT]:
        crossed = walk(tree)
        for process, files in crossed.items():
            print(f"{process}: {len(files)} files", *(f"    {name}" for name in files), sep="\n")
        together = {name for files in crossed.values() for name in files}
        counts.append(f"{tree}: {len(together)} files on the walk of a streamed chat request")
    print(*counts, sep="\n")


if __name__ == "__main__":
    main()

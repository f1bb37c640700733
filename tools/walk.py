"""What a streamed chat request crosses: `python tools/walk.py [--off] [--list] [TREE …]` (default: this tree).

Starts `quire serve quill` of each tree with a profiler in every process, warms it up, and traces one streamed chat
request from its first byte to its last. Prints, for all processes together, the files of `src` in which a
function ran with their lines, and those functions with theirs; and per process the lines of all modules that it has
loaded. Files that only hold constants or types that are not called do not count. `--off` turns off what runs by default
and is not needed for the answer; `--list` prints the files.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What runs by default and is not needed for the answer: the recorder, the hang watch, the golden prompt, the share of
# long prompts, the process in front that answers probes.
OFF = (
    *("--record-steps", "0", "--hang-timeout-s", "0", "--golden-interval-s", "0"),
    *("--long-prefill-token-threshold", "0", "--no-probe-process"),
)
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
# Every interpreter with this file on its path runs it when it starts. The profiler notes each function that is called
# while the first byte of the file "switch" is 1, and once all modules when it is 2. Code that `dataclass` generates has
# no file, but the globals of its module; it counts for the file and is no function of ours.
SITE = """
import mmap, os, sys, threading
folder = {folder!r}
sys.meta_path[:] = [finder for finder in sys.meta_path if "_editable_" not in type(finder).__module__]
switch = mmap.mmap(os.open(folder + "/switch", os.O_RDWR), 1)
seen = set()

def note(frame, event, argument):
    if event != "call" or not switch[0]:
        return
    name = frame.f_globals.get("__name__", "")
    if name.startswith("quire"):
        code = frame.f_code
        if code not in seen:
            seen.add(code)
            path = getattr(sys.modules.get(name), "__file__", name)
            line = code.co_firstlineno if code.co_filename == path else 0
            write("calls", path + ":" + str(line))
    if switch[0] == 2 and "modules" not in seen:
        seen.add("modules")
        for name, module in list(sys.modules.items()):
            if name.startswith("quire") and getattr(module, "__file__", None):
                write("modules", module.__file__)

def write(kind, text):
    with open(folder + "/" + kind + "." + str(os.getpid()), "a") as out:
        out.write(text + "\\n")

threading.setprofile(note)
sys.setprofile(note)
"""


@dataclass(frozen=True, slots=True)
class Walk:
    """What one request crossed. Paths are relative to `src`."""

    files: dict[str, list[str]]  # process → files in which a function ran
    functions: set[tuple[str, int]]  # file, first line
    modules: dict[str, list[str]]  # process → files of the modules that it has loaded
    tree: Path

    @property
    def together(self) -> set[str]:
        """The files of all processes."""
        return {name for files in self.files.values() for name in files}

    def num_lines(self, files: Iterable[str]) -> int:
        return sum((self.tree / "src" / name).read_text().count("\n") for name in files)

    def num_function_lines(self) -> int:
        """Return the lines of the functions that ran; one nested in another that ran counts once."""
        lines: set[tuple[str, int]] = set()
        for file in {file for file, _ in self.functions}:
            spans = function_spans(self.tree / "src" / file)
            for name, first in self.functions:
                if name == file and first in spans:
                    lines.update((file, line) for line in range(first, spans[first] + 1))
        return len(lines)


def function_spans(file: Path) -> dict[int, int]:
    """Return first line (of the first decorator, as code objects have it) → last line, per function of a file."""
    spans = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            assert node.end_lineno is not None
            spans[min([node.lineno, *(d.lineno for d in decorators)])] = node.end_lineno
    return spans


def walk(tree: Path, options: Sequence[str] = ()) -> Walk:
    """Serve Quill with ``options`` and trace one request."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        switch = folder / "switch"
        switch.write_bytes(b"\0")
        (folder / "sitecustomize.py").write_text(SITE.format(folder=str(folder)))
        with (folder / "log").open("wb") as log:
            server = start(tree, folder, log, options)
            try:
                url = wait_for_url(server, folder / "log")
                for _ in range(3):
                    ask(url)
                # In place: to cut the file to nothing, even for a moment, would take the page from under the servers.
                with switch.open("r+b", buffering=0) as byte:
                    byte.write(b"\1")
                    ask(url)
                    byte.seek(0)
                    byte.write(b"\2")
                    ask(url)
                    byte.seek(0)
                    byte.write(b"\0")
            finally:
                server.terminate()
                server.wait(TIMEOUT_S)
        return read(folder, tree, server.pid)


def read(folder: Path, tree: Path, api_pid: int) -> Walk:
    """Return what the profilers have written into ``folder``."""
    files, functions, modules = {}, set(), {}
    source = tree / "src"
    for note in sorted(folder.glob("*.*")):
        kind, _, pid = note.name.partition(".")
        process = "api" if pid == str(api_pid) else f"engine or helper {pid}"
        if kind == "modules":
            modules[process] = sorted(
                {str(Path(line).relative_to(source)) for line in note.read_text().split()}
            )
        elif kind == "calls":
            calls = [line.rpartition(":") for line in note.read_text().split()]
            files[process] = sorted({str(Path(path).relative_to(source)) for path, _, _ in calls})
            functions |= {
                (str(Path(path).relative_to(source)), int(line)) for path, _, line in calls if int(line)
            }
    return Walk(files, functions, modules, tree)


def start(tree: Path, folder: Path, log: object, options: Sequence[str]) -> subprocess.Popen[bytes]:
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
        *options,
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
    parser = argparse.ArgumentParser(description="Count what a streamed chat request crosses.")
    parser.add_argument("trees", nargs="*", type=Path, default=[ROOT])
    parser.add_argument("--off", action="store_true", help="turn off what is not needed for the answer")
    parser.add_argument("--list", action="store_true", help="print the files")
    args = parser.parse_args()
    for tree in args.trees:
        crossed = walk(tree.resolve(), OFF if args.off else ())
        for process, files in crossed.files.items():
            loaded = crossed.modules.get(process, [])
            size = f"{len(loaded)} modules with {crossed.num_lines(loaded)} lines loaded" if loaded else ""
            print(f"{process}: {len(files)} files{', ' + size if size else ''}")
            print(*(f"    {name}" for name in files if args.list), sep="\n", end="\n" if args.list else "")
        files = crossed.together
        print(
            f"{tree}: {len(files)} files with {crossed.num_lines(files)} lines; "
            f"{len(crossed.functions)} functions with {crossed.num_function_lines()} lines"
        )


if __name__ == "__main__":
    main()

"""Draw docs/terminal.svg, README's picture, from a real run of `quire serve`, `curl` and `quire bench serve`.

python tools/terminal_picture.py [--out docs/terminal.svg]
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 110  # columns
PORT = 8000
ASK = f"""ask() {{
  curl -s http://127.0.0.1:{PORT}/v1/completions -H 'content-type: application/json' \\
    -d '{{"prompt": "The fog came in from the sea", "seed": 7, "max_tokens": 32}}' |
    python3 -c 'import json, sys; a = json.load(sys.stdin); print(a["determinism"], a["choices"][0]["text"])'
}}"""
LOAD = "quire bench serve --limit 256 --concurrency 64 --input-len 128 --output-len 128"


class Picture:
    """A terminal that keeps what it shows."""

    def __init__(self) -> None:
        self.console = Console(
            record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False
        )

    def command(self, text: str) -> None:
        first, *rest = text.splitlines()
        self.console.print(Text("$ ", style="bold green") + Text(first, style="bold"))
        for line in rest:
            self.console.print(Text(line, style="bold"))

    def output(self, text: str) -> None:
        """Print each line, cut at the edge of the window."""
        for line in text.rstrip().splitlines():
            cut = line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"
            self.console.print(Text(cut))


def bash(script: str) -> str:
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout


def wait_ready() -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/readyz", timeout=1)
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit("the server did not become ready")


def draw(picture: Picture) -> None:
    command = f"quire serve quill --port {PORT}"
    server = subprocess.Popen(command.split(), stderr=subprocess.PIPE, text=True)
    lines: list[str] = []
    assert server.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(server.stderr or ()), daemon=True)
    reader.start()
    try:
        wait_ready()
        time.sleep(0.5)  # the report is printed once the port answers
        picture.command(f"{command} &")
        picture.output(
            "".join(line for line in lines if line.startswith(("ready", "model", "exact", "cache")))
        )
        picture.command(ASK)
        alone = bash(f"{ASK}\nask")
        picture.command("ask")
        picture.output(alone)
        load = subprocess.Popen(LOAD.split(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        time.sleep(4)  # its imports, its warm-up, then 64 requests at once
        assert load.poll() is None
        picture.command(f"{LOAD} > load.txt &")
        picture.command(
            "ask                                  # the same request beside 64 others: the same bits"
        )
        crowded = bash(f"{ASK}\nask")
        still = load.poll() is None
        picture.output(crowded)
        summary, _ = load.communicate()
        if not still or crowded != alone:
            raise SystemExit("the load had ended, or the answers differ: no picture")
        picture.command("head -n 12 load.txt")
        picture.output("\n".join(summary.splitlines()[:12]))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "terminal.svg")
    given = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    picture = Picture()
    draw(picture)
    given.out.write_text(picture.console.export_svg(title="quire", unique_id="quire-terminal"))


if __name__ == "__main__":
    main()

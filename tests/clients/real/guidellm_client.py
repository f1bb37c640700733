"""guidellm's runs of chat and text completions, with the served model's tokenizer; data are synthetic."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from check import QUILL, check

TOKENIZER = Path(__file__).parents[3] / "src" / "quire" / "models" / "quill_data" / "quill"
COMMAND = Path(sys.executable).parent / "guidellm"


def run(profile: str, **backend: str) -> dict[str, Any]:
    """Return the report of one run."""
    given = {"kind": "openai_http", "target": QUILL, **backend}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [
            COMMAND, "run",
            "--backend", ",".join(f"{name}={value}" for name, value in given.items()),
            "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
            "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
            "--profile", profile,
            "--constraint", "kind=max_requests,count=6",
            "--output", f"kind=json,path={path}",
            "--disable-progress",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-1000:]
        return dict(json.loads(path.read_text()))


def check_totals(report: dict[str, Any]) -> None:
    for benchmark in report["benchmarks"]:
        totals = benchmark["metrics"]["request_totals"]
        assert totals["successful"] >= 6, totals
        assert totals["errored"] == 0, totals


@check("chat completions, two streams at once")
def _() -> None:
    check_totals(run("kind=concurrent,streams=2"))


@check("text completions, one after the other")
def _() -> None:
    check_totals(run("kind=synchronous", request_format="/v1/completions"))

"""`quire diagnose`: what limits a running server, and what to change."""

from __future__ import annotations

import asyncio
import json

from quire_lab.bench.page import console, finite
from quire_lab.diagnose.figures import figures
from quire_lab.diagnose.read import read
from quire_lab.diagnose.rules import Diagnosis, diagnose

_VERDICTS = {
    "idle": "Nothing was asked of it: diagnose it under load (as of `quire bench serve --url …`).",
    "no-step": "No step ended in this time: watch it for longer (--seconds).",
    "fine": "Nothing limits it.",
}


def run(
    url: str, seconds: float, key: str | None, admin_url: str | None, admin_key: str | None, *, as_json: bool
) -> int:
    """Print the diagnosis. Raises ConfigError."""
    reading = asyncio.run(read(url, seconds, key=key, admin_url=admin_url, admin_key=admin_key))
    diagnosis = diagnose(figures(reading))
    if as_json:
        print(json.dumps(finite({"url": reading.url, **diagnosis.as_dict()}), indent=1))
        return 0
    _print(reading.url, diagnosis)
    return 0


def _print(url: str, diagnosis: Diagnosis) -> None:
    out, f = console(), diagnosis.figures
    out.print(
        f"[bold]{url}[/bold] {f.model}, {f.seconds:.1f} s: {f.requests:.0f} requests ended, "
        f"{f.prompt_tokens / f.seconds:,.0f} prompt and {f.output_tokens / f.seconds:,.0f} output tokens/s, "
        f"{f.running:.1f} running, {f.waiting:.1f} waiting, KV cache {f.kv_usage:.0%} full",
        highlight=False,
    )
    if text := _VERDICTS.get(diagnosis.verdict):
        out.print(text, highlight=False)
    for number, finding in enumerate(diagnosis.findings, 1):
        out.print(
            f"\n[bold]{number}. {finding.what}[/bold] [dim]({finding.name}; costs about {finding.cost:.0%})[/dim]",
            highlight=False,
        )
        for text in finding.because:
            out.print(f"   {text}", highlight=False, markup=False)
        for text in finding.change:
            out.print(f"   [green]→[/green] {text}", highlight=False)

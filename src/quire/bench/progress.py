"""What a person sees while a load runs: how much is done, what runs now, and how fast it is."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire.bench.summary import ERROR, RequestRecord, percentile
from quire.workload.request import WorkloadRequest

WINDOW = 100  # requests that the latencies shown are taken from
REFRESH_S = 0.25


class LiveProgress:
    """One line on stderr where that is a terminal; nothing elsewhere. Give it every request and every record."""

    def __init__(self, total: int, what: str) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}"),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._bar.add_task(what, total=total, now="")
        self._running = self._failed = self._tokens = 0
        self._last: list[RequestRecord] = []
        self._start_s = self._shown_s = time.monotonic()

    def __enter__(self) -> LiveProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def observe(self, what: WorkloadRequest | RequestRecord) -> None:
        """Count a request that was sent, or the record of one that ended."""
        if isinstance(what, WorkloadRequest):
            self._running += 1
        else:
            self._running -= 1
            self._failed += what.status == ERROR
            self._tokens += what.num_output_tokens
            self._last = [*self._last[1 - WINDOW :], what]
            self._bar.advance(self._task)
        now_s = time.monotonic()
        if not self._bar.disable and now_s - self._shown_s >= REFRESH_S:
            self._shown_s = now_s
            self._bar.update(self._task, now=self.line(now_s))

    def line(self, now_s: float) -> str:
        """Running, failed, tokens a second so far, and the median TTFT and TPOT of the last requests."""
        ttft = percentile(sorted(r.ttft_s for r in self._last if r.ttft_s is not None), 50)
        tpot = percentile(sorted(r.tpot_s for r in self._last if r.tpot_s is not None), 50)
        parts = [
            f"{self._running} running",
            f"{self._tokens / max(1e-9, now_s - self._start_s):.0f} tokens/s",
        ]
        parts += [f"TTFT {ttft * 1e3:.0f} ms"] if ttft is not None else []
        parts += [f"TPOT {tpot * 1e3:.1f} ms"] if tpot is not None else []
        parts += [f"{self._failed} failed"] if self._failed else []
        return ", ".join(parts)

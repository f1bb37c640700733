"""From one record per request to one summary, with the same keys from ``quire bench serve`` and ``quire simulate``.

TTFT = first token − arrival; E2EL = last token − arrival; TPOT = (E2EL − TTFT) / (output tokens − 1); ITL = each gap
between two tokens. Arrival is the *intended* send time, so a client that falls behind or waits for a connection does
not hide the time that its requests waited (coordinated omission). Goodput = completed requests/s that met every SLO.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from quire.slo import Slo
from quire_lab.workload.request import WorkloadRequest

PERCENTILES = (50, 90, 95, 99)
OK, CANCELLED, ERROR = "ok", "cancelled", "error"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What happened to one request. Times are seconds since the start of the run."""

    index: int
    arrival_s: float  # the intended send time
    sent_s: float  # the actual send time
    end_s: float  # last token, or the time of the failure
    num_prompt_tokens: int
    num_output_tokens: int
    first_token_s: float | None = None
    itl_s: tuple[float, ...] = ()  # one per token after the first; equal within a chunk
    status: str = OK  # ok, cancelled (by this client, as planned) or error
    error: str | None = None  # the kind of error, by which errors are counted
    detail: str | None = None  # the message of the server or the connection
    num_cached_tokens: int = 0  # prompt tokens, where the server reports them

    @classmethod
    def not_sent(cls, turn: WorkloadRequest, due_s: float, why: str | None) -> RequestRecord:
        """Return the record of a later turn that failed because an earlier turn of its session did."""
        return cls(turn.index, due_s, due_s, due_s, turn.num_prompt_tokens, 0,
                   status=ERROR, error="earlier turn failed", detail=why)  # fmt: skip

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def e2el_s(self) -> float:
        return self.end_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """None with fewer than two tokens."""
        if self.first_token_s is None or self.num_output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.num_output_tokens - 1)

    def as_dict(self) -> dict[str, Any]:
        """One line of the JSON lines file: the fields, and TTFT, TPOT and E2EL in milliseconds."""
        derived = {"ttft_ms": self.ttft_s, "tpot_ms": self.tpot_s, "e2el_ms": self.e2el_s}
        return asdict(self) | {name: None if s is None else s * 1e3 for name, s in derived.items()}


@dataclass(slots=True)
class Timing:
    """What a client knows of one request while it runs. Times are seconds on the client's own clock."""

    sent_s: float
    first_s: float | None = None
    last_s: float = 0.0
    num_prompt_tokens: int | None = None  # counted by the server
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    gaps: list[float] = field(default_factory=list)  # seconds, one per token after the first

    def tokens(self, now_s: float, num: int) -> None:
        """Count ``num`` tokens that arrived together."""
        if self.first_s is None:
            self.first_s = now_s
            self.gaps += [0.0] * (num - 1)
        else:
            self.gaps += [(now_s - self.last_s) / num] * num
        self.last_s = now_s
        self.num_output_tokens += num

    def record(
        self, request: WorkloadRequest, *, arrival_s: float, start_s: float, end_s: float, status: str = OK,
        error: str | None = None, detail: str | None = None,
    ) -> RequestRecord:  # fmt: skip
        """Return the record of ``request``; ``start_s`` is the start of the run on the client's clock."""
        return RequestRecord(
            index=request.index,
            arrival_s=arrival_s - start_s,
            sent_s=self.sent_s - start_s,
            end_s=end_s - start_s,
            num_prompt_tokens=self.num_prompt_tokens or request.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            first_token_s=None if self.first_s is None else self.first_s - start_s,
            itl_s=tuple(self.gaps),
            status=status,
            error=error,
            detail=detail,
            num_cached_tokens=self.num_cached_tokens,
        )


def summarize(
    records: Sequence[RequestRecord],
    *,
    slo: Slo | None = None,
    duration_s: float | None = None,
    refused_rows: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Return the summary, ready for JSON.

    Latencies are those of completed requests; tokens are those of all requests. Without ``duration_s`` the duration is
    the time from the start of the run to the last token. Without an SLO every completed request counts for goodput.
    """
    done = [r for r in records if r.status == OK]
    if duration_s is None:
        duration_s = max((r.end_s for r in records), default=0.0)
    good = [r for r in done if (slo or Slo()).met(r.ttft_s, r.tpot_s, r.e2el_s)]
    prompts = [r for r in records if r.first_token_s is not None]

    def per_s(count: int) -> float:
        return count / duration_s if duration_s > 0.0 else 0.0

    return {
        "ttft_ms": distribution(r.ttft_s for r in done),
        "tpot_ms": distribution(r.tpot_s for r in done),
        "itl_ms": distribution(gap_s for r in done for gap_s in r.itl_s),
        "e2el_ms": distribution(r.e2el_s for r in done),
        "output_tokens_per_s": per_s(sum(r.num_output_tokens for r in records)),
        "input_tokens_per_s": per_s(sum(r.num_prompt_tokens for r in prompts)),
        "requests_per_s": per_s(len(done)),
        "goodput_per_s": per_s(len(good)),
        "slo": slo.as_dict() if slo else {},
        "duration_s": duration_s,
        "num_requests": len(records),
        "num_completed": len(done),
        "num_good": len(good),
        "num_cancelled": sum(r.status == CANCELLED for r in records),
        "num_failed": sum(r.status == ERROR for r in records),
        "errors": dict(Counter(r.error or "unknown" for r in records if r.status == ERROR)),
        "num_input_tokens": sum(r.num_prompt_tokens for r in prompts),
        "num_output_tokens": sum(r.num_output_tokens for r in records),
        "num_cached_tokens": sum(r.num_cached_tokens for r in prompts),
        "num_refused_rows": sum((refused_rows or {}).values()),
        "refused_rows": dict(refused_rows or {}),
    }


def tail_ratio(latency: Mapping[str, float | None]) -> float:
    """Return P99 / P50 of a `distribution`; over 10, a few requests wait far longer than the others. 1: no values."""
    return (latency["p99"] or 1.0) / (latency["p50"] or latency["p99"] or 1.0)


def distribution(seconds: Iterable[float | None]) -> dict[str, float | None]:
    """Return ``mean``, ``p50`` … ``p99`` in milliseconds of the values that are not None; all None where none is."""
    values = [s * 1e3 for s in seconds if s is not None]
    names = [f"p{percent}" for percent in PERCENTILES]
    if not values:
        return dict.fromkeys(("mean", *names))
    percentiles = np.percentile(values, PERCENTILES).tolist()
    return {"mean": math.fsum(values) / len(values), **dict(zip(names, percentiles, strict=True))}

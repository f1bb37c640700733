"""`Row`: one request in the ledger, and the `Price` of its tokens."""

from __future__ import annotations

from dataclasses import dataclass

NANO = 1_000_000_000
RECOVERED = "recovered"  # outcome of a row that is made from a replica's record
UNSETTLED = "unsettled"  # outcome of a row that is made from what a killed gateway knew of a request that ran


@dataclass(frozen=True, slots=True)
class Row:
    """One request. Times in milliseconds; money in billionths of the currency."""

    request_id: str
    finished_at: float  # Unix time in seconds
    tenant: str
    key: str  # its name
    model: str
    backend: str
    endpoint: str
    outcome: str  # of an `Exchange`, `RECOVERED` or `UNSETTLED`
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float
    e2el_ms: float
    price_nano: int
    estimated: int = 0  # 1: a count of tokens is an estimate of the gateway's
    met_slo: int = 0  # 1: an answer within every latency of ``[slo]``
    engine_s: float = 0.0  # the engine's time for its tokens
    kv_block_s: float = 0.0  # KV blocks that it held, times seconds


@dataclass(frozen=True, slots=True)
class Price:
    """Money per million tokens of one model; cached input may cost less."""

    input: float = 0.0
    cached_input: float | None = None  # None: as input
    output: float = 0.0

    def nano(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Return the price of a request in billionths."""
        cached = self.input if self.cached_input is None else self.cached_input
        plain = prompt_tokens - cached_tokens
        return round((plain * self.input + cached_tokens * cached + output_tokens * self.output) * NANO / 1e6)

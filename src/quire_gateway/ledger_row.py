"""`Row`: one request in the ledger, made from an `Exchange` or from a replica's record of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.http.account import Used
from quire_gateway.quotas import Usage

if TYPE_CHECKING:  # `quire ledger` reads rows without a gateway
    from quire_gateway.exchange import Exchange

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

    @classmethod
    def from_exchange(
        cls, exchange: Exchange, now: float, outcome: str, used: Usage, *, met_slo: bool = False
    ) -> Row:
        """Return the row of a request that has ended, or has begun, ``now``."""
        target, backend = exchange.target, exchange.backend
        begin_s, first_s = exchange.arrival_s, exchange.answer.first_s
        return cls(
            request_id=exchange.ledger_id,
            finished_at=time.time(),
            tenant=exchange.tenant,
            key=exchange.key,
            model=target.model if target is not None else exchange.named_model,
            backend=backend.name if backend is not None else "",
            endpoint=exchange.path,
            outcome=outcome,
            prompt_tokens=used.input_tokens,
            cached_tokens=min(exchange.usage.cached_tokens or 0, used.input_tokens),
            output_tokens=used.output_tokens,
            ttft_ms=1e3 * (first_s - begin_s) if first_s is not None else 0.0,
            e2el_ms=1e3 * (now - begin_s),
            price_nano=used.money_nano,
            estimated=int(used.input_tokens > 0 and exchange.usage.is_estimate),
            met_slo=int(met_slo),
            engine_s=exchange.usage.engine_s,
            kv_block_s=exchange.usage.kv_block_s,
        )

    @classmethod
    def from_record(cls, used: Used, backend: str) -> Row:
        """Return the row of a request by what the replica ``backend`` knows. The price is set when it is booked."""
        return cls(
            request_id=used.request_id,
            finished_at=used.finished_at,
            tenant=used.tenant,
            key=used.key,
            model=used.model,
            backend=backend,
            endpoint=used.endpoint,
            outcome=RECOVERED,
            prompt_tokens=used.prompt_tokens,
            cached_tokens=used.cached_tokens,
            output_tokens=used.output_tokens,
            ttft_ms=0.0,
            e2el_ms=used.e2el_ms,
            price_nano=0,
            engine_s=used.engine_s,
            kv_block_s=used.kv_block_s,
        )

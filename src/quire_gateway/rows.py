"""Rows of the ledger, and what a request has used: from an `Exchange`, or from a replica's record of it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from quire.http.account import Used
from quire.slo import Slo
from quire_gateway.exchange import Exchange
from quire_gateway.fleet import Backend
from quire_gateway.ledger_row import RECOVERED, Price, Row
from quire_gateway.quotas import Usage

Prices = Mapping[str, Price]  # by model
_FREE = Price()


def price_of(prices: Prices, model: str) -> Price:
    return prices.get(model, _FREE)


def row_of(exchange: Exchange, now: float, outcome: str, used: Usage) -> Row:
    """Return the row of a request that has ended, or has begun, ``now``."""
    target, backend = exchange.target, exchange.backend
    begin_s, first_s = exchange.arrival_s, exchange.first_s
    return Row(
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
        met_slo=int(exchange.met_slo),
        engine_s=exchange.usage.engine_s,
        kv_block_s=exchange.usage.kv_block_s,
    )


def row_of_record(used: Used, backend: Backend) -> Row:
    """Return the row of a request by what its replica knows. The price is set when it is booked."""
    return Row(
        request_id=used.request_id,
        finished_at=used.finished_at,
        tenant=used.tenant,
        key=used.key,
        model=used.model,
        backend=backend.name,
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


def used_of(exchange: Exchange, prices: Prices) -> Usage | None:
    """Return what a request used; None for what is no answer: nothing was touched, or the client got an error alone.

    What an answer does not say of itself is counted: the prompt by what was reserved for it, the output by its text.
    """
    if exchange.backend is None or exchange.outcome in ("refused", "failed"):
        return None
    usage, reserved = exchange.usage, exchange.reserved
    prompt = reserved.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
    output = output_so_far(exchange)
    if exchange.outcome == "broken" and not output:
        return None
    assert exchange.target is not None
    price = price_of(prices, exchange.target.model)
    return Usage(prompt, output, price.nano(prompt, min(usage.cached_tokens or 0, prompt), output))


def output_so_far(exchange: Exchange) -> int:
    """Return the output tokens of an answer up to now; an estimate is at most what the request has reserved."""
    counted = exchange.usage.output_tokens or 0
    return max(counted, min(counted + exchange.usage.uncounted, exchange.reserved.output_tokens))


def meets(slo: Slo, exchange: Exchange, now: float) -> bool:
    """Whether an answer that ended ``now`` was whole and within every latency.

    The first token of an answer that is not streamed is not seen: the whole has to come in what TTFT and TPOT allow.
    """
    if exchange.outcome != "ok" or exchange.backend is None:
        return False
    e2el_s, num_more = now - exchange.arrival_s, max(output_so_far(exchange) - 1, 0)
    if exchange.first_s is None:
        both_s = math.inf
        if slo.ttft_s is not None and slo.tpot_s is not None:
            both_s = slo.ttft_s + num_more * slo.tpot_s
        return e2el_s <= min(both_s, math.inf if slo.e2el_s is None else slo.e2el_s)
    ttft_s = exchange.first_s - exchange.arrival_s
    return slo.met(ttft_s, (e2el_s - ttft_s) / num_more if num_more else None, e2el_s)

"""What a request has used, from its `Exchange`, and whether it met the service level."""

from __future__ import annotations

import math

from quire.slo import Slo
from quire_gateway.exchange import Exchange
from quire_gateway.prices import Prices, find_price
from quire_gateway.quotas import Usage


def billed_usage(exchange: Exchange, prices: Prices) -> Usage | None:
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
    price = find_price(prices, exchange.target.model)
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
    if exchange.answer.first_s is None:
        both_s = math.inf
        if slo.ttft_s is not None and slo.tpot_s is not None:
            both_s = slo.ttft_s + num_more * slo.tpot_s
        return e2el_s <= min(both_s, math.inf if slo.e2el_s is None else slo.e2el_s)
    ttft_s = exchange.answer.first_s - exchange.arrival_s
    return slo.met(ttft_s, (e2el_s - ttft_s) / num_more if num_more else None, e2el_s)

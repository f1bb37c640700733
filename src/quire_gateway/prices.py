"""`Price`: what the tokens of one model cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire_gateway.quotas import NANO


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


Prices = Mapping[str, Price]  # by model
_FREE = Price()


def find_price(prices: Prices, model: str) -> Price:
    return prices.get(model, _FREE)

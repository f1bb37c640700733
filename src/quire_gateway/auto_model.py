"""The model `auto`: each request gets the model of the first rule that holds.

    [auto]
    default = "large"                     # where no rule holds
    judge = "my_judge:difficulty"         # (body) → 0…1, for rules that ask for it
    [[auto.rules]]
    model = "small"
    max_prompt_tokens = 500
    max_difficulty = 0.4
    [[auto.rules]]
    model = "small"
    max_budget_left = 0.1                 # a tenth of the day's or the month's

The model chosen is named in ``x-quire-model``. A rule whose model the key may not use does not hold.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from prometheus_client.core import Metric

from quire.errors import ConfigError
from quire.http.keys import ApiKey
from quire.metrics.log import Log
from quire_gateway.auto_config import AutoConfig, RuleArgs
from quire_gateway.client_request import ClientRequest
from quire_gateway.exchange import Exchange
from quire_gateway.metrics import counter
from quire_gateway.stage import Stage

log = Log("gateway")


class AutoModel(Stage):
    """Chooses among models. ``budget_left``: the smallest share that (key, tenant) has left of a budget."""

    def __init__(
        self,
        config: AutoConfig,
        num_tokens: Callable[[ClientRequest, str], int],
        budget_left: Callable[[str, str], Awaitable[float]],
    ) -> None:
        self.name = config.args.name
        self.counts: Counter[tuple[str]] = Counter()  # (model,)
        self._config = config
        self._num_tokens = num_tokens
        self._budget_left = budget_left
        self._judge = _load(config.args.judge) if config.args.judge is not None else None

    def metrics(self) -> Iterable[Metric]:
        yield counter(
            "quire:gateway_auto_models", "Requests for auto by the model chosen.", ("model",), self.counts
        )

    async def model(self, exchange: Exchange, name: str | None) -> str | None:
        """Replace the name ``auto``, and tell the client by what."""
        if name != self.name:
            return name
        assert exchange.request is not None
        chosen = await self.choose(exchange.request, exchange.call.key)
        exchange.answer.headers.append((b"x-quire-model", chosen.encode()))
        return chosen

    async def choose(self, request: ClientRequest, key: ApiKey | None) -> str:
        """Return the name of the model for a request."""
        difficulty = None
        if any(rule.asks_judge for rule in self._config.rules):
            difficulty = await self._difficulty(request)
        chosen = self._config.args.default
        for rule in self._config.rules:
            if await self._holds(rule, request, key, difficulty):
                chosen = rule.model
                break
        self.counts[(chosen,)] += 1
        return chosen

    async def _holds(
        self, rule: RuleArgs, request: ClientRequest, key: ApiKey | None, difficulty: float | None
    ) -> bool:
        tenant, name = (key.tenant, key.name) if key is not None else ("", "")
        if key is not None and not key.allows_model(rule.model):
            return False
        if rule.tenants and tenant not in rule.tenants:
            return False
        if not _within(self._num_tokens(request, rule.model), rule.min_prompt_tokens, rule.max_prompt_tokens):
            return False
        if rule.asks_judge and (
            difficulty is None or not _within(difficulty, rule.min_difficulty, rule.max_difficulty)
        ):
            return False
        return rule.max_budget_left is None or await self._budget_left(name, tenant) <= rule.max_budget_left

    async def _difficulty(self, request: ClientRequest) -> float | None:
        """Return what the judge says; None if it fails: the rules that ask for it then do not hold."""
        assert self._judge is not None
        try:
            async with asyncio.timeout(self._config.args.judge_timeout_s):
                if inspect.iscoroutinefunction(self._judge):
                    return float(await self._judge(request.body))
                return float(await asyncio.to_thread(self._judge, request.body))
        except Exception as error:  # of the judge's own code
            log.warning("judge_failed", error=f"{type(error).__name__}: {error}"[:300])
            return None


def _within(value: float, low: float | None, high: float | None) -> bool:
    return (low is None or value >= low) and (high is None or value <= high)


def _load(path: str) -> Callable[[Any], Any]:
    module, _, name = path.partition(":")
    try:
        judge = getattr(importlib.import_module(module), name) if module and name else None
    except Exception as error:  # of the module's own code
        raise ConfigError(f"[auto]: judge = {path!r} cannot be loaded: {error}") from error
    if not callable(judge):
        raise ConfigError(f"[auto]: judge = {path!r} must be module:function")
    return judge  # type: ignore[no-any-return]

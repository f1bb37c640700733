"""Admission: which models a request may be tried at, and what it may use at most."""

from __future__ import annotations

from collections.abc import Callable

from quire.errors import NotFoundError, RequestError
from quire.http.refusals import OLLAMA_ROOT
from quire_gateway.catalog import Catalog, Target
from quire_gateway.client_request import ClientRequest
from quire_gateway.config import GatewayConfig
from quire_gateway.exchange import Exchange
from quire_gateway.prices import find_price
from quire_gateway.quotas import Usage
from quire_gateway.stage import Pipeline

# Paths that generate no tokens: only the prompt is reserved.
_NO_OUTPUT = (
    "/embeddings",
    "/embed",
    "/embed_all",
    "/embed_sparse",
    "/predict",
    "/similarity",
    "/api/show",
    "/score",
    "/rerank",
    "tokenize",
    "/render",
    "/count_tokens",
    "/input_tokens",
    "/pooling",
    "/classify",
)


class Admission:
    """Admits the requests of one path. ``num_tokens``: of a request's prompt at a model, as estimated."""

    def __init__(
        self,
        config: GatewayConfig,
        catalog: Catalog,
        num_tokens: Callable[[ClientRequest, str], int],
        stages: Pipeline,
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._num_tokens = num_tokens
        self._stages = stages

    async def admit(self, exchange: Exchange) -> None:
        """Have the stages reserve what a request may use; only then tell what becomes of the model that it names.

        A request for a model that is not known, or that its key may not use, counts as a request: it passes no limit.

        Raises:
            HttpError: a stage refuses it: a limit is used up, or it cannot be booked.
            RequestError: no model can be told, it is not known, or the key may not use it.
        """
        problem: RequestError | None = None
        try:
            exchange.targets = await self._targets(exchange)
        except RequestError as error:
            problem = error
        model = exchange.targets[0].model if exchange.targets else ""
        exchange.reserved = self._most(exchange, model)
        await self._stages.admit(exchange, model)
        if problem is not None:
            raise problem
        _check_key(exchange, model)

    async def _targets(self, exchange: Exchange) -> list[Target]:
        """Return the models to try for a request. Raises what `Catalog.targets` does."""
        assert exchange.request is not None
        name = exchange.request.model or self._config.server.default_model
        if exchange.path.startswith(OLLAMA_ROOT):
            name = self._catalog.tagged(name)
        return self._catalog.targets(await self._stages.model(exchange, name))

    def _most(self, exchange: Exchange, model: str) -> Usage:
        """Return what a request may use at most. ``model``: empty where it is not known."""
        request = exchange.request
        assert request is not None
        prompt = self._num_tokens(request, model)
        output = 0 if exchange.path.endswith(_NO_OUTPUT) else request.num_output_tokens
        return Usage(prompt, output, find_price(self._config.prices, model).nano(prompt, 0, output))


def _check_key(exchange: Exchange, model: str) -> None:
    """Leave out the targets that the request's key may not use. Raises `NotFoundError` if that is ``model``."""
    key = exchange.call.key
    if key is None:
        return
    if not key.allows_model(model):
        raise NotFoundError(
            f"The key {key.name!r} may not use the model {model!r}; it may use {', '.join(key.models)}.",
            param="model",
            code="model_not_found",
        )
    exchange.targets = [target for target in exchange.targets if key.allows_model(target.model)]

"""What the endpoints of one app share: engine, settings, metrics, clocks, running requests, stored responses."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.api.busy import Busy
from quire.api.dialects.responses.store import ResponseStore
from quire.api.forecast import TtftForecast
from quire.api.settings import ApiSettings
from quire.engine.frontend import Frontend
from quire.engine.large_body import LargeBodies
from quire.engine.prompts import ModelInfo
from quire.http.call import Call
from quire.metrics.server import ServerMetrics
from quire.metrics.trace import RequestTracer
from quire.request import Adapter
from quire.text.chat_template import ChatTemplate
from quire.text.output.formats import FORMATS, OutputFormat
from quire.text.output.generic import format_of


@dataclass(frozen=True, slots=True)
class ApiState:
    """The engine, the settings, the metrics and two clocks."""

    frontend: Frontend
    model: ModelInfo
    settings: ApiSettings
    metrics: ServerMetrics
    now: Callable[[], float]  # monotonic seconds, for latencies
    unix_time: Callable[[], float]  # seconds since 1970, for "created"
    new_id: Callable[[], str]  # 32 hexadecimal digits, unique
    started_unix: int
    reasons: bool  # the model writes reasoning, which is separated
    responses: ResponseStore
    running: RunningRequests
    bodies: LargeBodies
    busy: Busy
    tracer: RequestTracer | None = None
    forecast: TtftForecast | None = None  # with --slo
    on_demand: dict[str, Any] = field(default_factory=dict)  # made for the first request that asks for it

    def output_format(self, has_tools: bool) -> OutputFormat:
        """Return how the model writes reasoning and calls."""
        return output_format(self.settings, self.frontend.chat_template, has_tools=has_tools)

    def unread(self, body: Any, call: Call) -> list[str]:
        """Return the fields of a body that are for the scheduler, and that its order does not read."""
        order = self.frontend.stats().order
        if not order or not isinstance(body, dict):
            return []
        read = {"priority": order == "priority", "user": self.reads_tenants(call)}
        return [name for name, is_read in read.items() if body.get(name) and not is_read]

    def reads_tenants(self, call: Call) -> bool:
        """Whether the order reads the tenant that a request names; that of its key replaces it."""
        return self.frontend.stats().order in ("", "fair") and not call.tenant

    def continuable_with(self, name: str) -> str:
        """Return a digest of all that the output of model ``name`` depends on, beside the request.

        Where it is equal, another replica can continue a stream.
        """
        adapter, settings, model = self.adapter_of(name), self.settings, self.model
        sources = sorted(self.frontend.chat_template.sources.items())
        limits = (model.max_model_len, model.eos_token_ids, sorted(model.generation_defaults.items()))
        scope = (settings.system_fingerprint, settings.tool_format, adapter and adapter.key, sources, limits)
        return hashlib.blake2b(repr(scope).encode(), digest_size=12).hexdigest()

    @property
    def adapter_names(self) -> tuple[str, ...]:
        registry = self.frontend.adapters
        return () if registry is None else tuple(registry.adapters)

    def adapter_of(self, model: str) -> Adapter | None:
        """Return the adapter that a request for ``model`` runs with; None: the base model.

        Raises:
            NotFoundError: the adapter was unloaded since `served_name`.
        """
        registry = self.frontend.adapters
        if registry is None or model in self.model.names:
            return None
        return registry.find(model)


def output_format(settings: ApiSettings, template: ChatTemplate, *, has_tools: bool) -> OutputFormat:
    """Return --tool-format, or what the model's chat template shows."""
    if settings.tool_format != "auto":
        return FORMATS[settings.tool_format]
    if not template.names:
        return FORMATS["plain"]
    return format_of(template.source(has_tools))


def is_busy(frontend: Frontend) -> bool:
    """Whether requests wait for the engine now, or it takes none: batches pause then."""
    return frontend.state != "ready" or frontend.stats().num_waiting > 0


class Cancellable(Protocol):
    """A request that is running."""

    @property
    def owner(self) -> str:
        """Return the tenant that it runs for."""

    async def cancel(self) -> None:
        """End it now; its client gets an error."""

    def describe(self, now_s: float) -> dict[str, Any]:
        """Return its line in ``GET /requests``."""


class RunningRequests(dict[object, tuple[frozenset[str], Cancellable]]):
    """The running requests in order of arrival, each with its ids: that of the answer, and ``x-request-id``."""

    def named(self, request_id: str) -> list[Cancellable]:
        """Return the requests of this id, which clients may use more than once."""
        return [request for ids, request in self.values() if request_id in ids]

    def describe(self, now_s: float, owner: str | None = None) -> list[dict[str, Any]]:
        """Return their lines; ``owner``: those of this tenant alone."""
        requests = [request for _, request in self.values()]
        return [request.describe(now_s) for request in requests if owner in (None, request.owner)]

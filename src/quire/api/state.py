"""What the endpoints of one app share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.api.forecast import TtftForecast
from quire.api.response_store import ResponseStore
from quire.api.running import RunningRequests
from quire.api.settings import ApiSettings
from quire.engine.frontend import Frontend
from quire.engine.prepare import ModelInfo
from quire.errors import NotFoundError
from quire.metrics.prometheus import ServerMetrics
from quire.metrics.trace import RequestTracer
from quire.request import Adapter
from quire.text.output import FORMATS, OutputFormat, detect_format


@dataclass(frozen=True, slots=True)
class ApiState:
    """The engine, the settings, the metrics and two clocks."""

    frontend: Frontend
    settings: ApiSettings
    metrics: ServerMetrics
    now: Callable[[], float]  # monotonic seconds, for latencies
    unix_time: Callable[[], float]  # seconds since 1970, for "created"
    new_id: Callable[[], str]  # 32 hexadecimal digits, never twice the same
    started_unix: int
    responses: ResponseStore
    running: RunningRequests
    tracer: RequestTracer | None = None
    forecast: TtftForecast | None = None  # with --slo

    def output_format(self, has_tools: bool) -> OutputFormat:
        """Return how the model writes reasoning and calls: --tool-format, or what its chat template shows."""
        if self.settings.tool_format != "auto":
            return FORMATS[self.settings.tool_format]
        template = self.frontend.chat_template
        if template is None or not template.names:
            return FORMATS["plain"]
        return detect_format(template.source(has_tools))

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of the special tokens, which an answer does not show."""
        return self.frontend.tokenizer.special_texts

    @property
    def model(self) -> ModelInfo:
        return self.frontend.model

    def check_model(self, name: str | None) -> str:
        """Return the name that the answer carries: that of the model or an adapter, as asked for, or the model's first.

        Raises:
            NotFoundError: ``name`` is not served; lists what is.
        """
        names = self.model.names
        if name is None:
            return names[0]
        if name not in names and name not in self.adapter_names:
            served = ", ".join(repr(n) for n in names)
            loaded = ", ".join(repr(n) for n in self.adapter_names)
            text = f"The model {name!r} is not served here. Served: {served}."
            raise NotFoundError(
                text + (f" Adapters: {loaded}." if loaded else ""), param="model", code="model_not_found"
            )
        return name

    @property
    def adapter_names(self) -> tuple[str, ...]:
        registry = self.frontend.adapters
        return () if registry is None else tuple(registry.adapters)

    def adapter_of(self, model: str) -> Adapter | None:
        """Return the adapter that a request for ``model`` runs with; None: the base model.

        Raises:
            NotFoundError: it was unloaded since `check_model` let the request in.
        """
        registry = self.frontend.adapters
        if registry is None or model in self.model.names:
            return None
        return registry.find(model)


def is_busy(frontend: Frontend) -> bool:
    """Whether requests wait for the engine now, or it takes none: batches pause then."""
    return frontend.state != "ready" or frontend.stats().num_waiting > 0

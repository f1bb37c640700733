"""What the endpoints of one app share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.api.settings import ApiSettings
from quire.engine.frontend import Frontend
from quire.engine.model_info import ModelInfo
from quire.errors import NotFoundError
from quire.metrics.prometheus import ServerMetrics


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

    @property
    def model(self) -> ModelInfo:
        return self.frontend.model

    def check_model(self, name: str | None) -> str:
        """Return the name that the answer carries: the one asked for, or the model's first.

        Raises:
            NotFoundError: ``name`` is not served; lists those that are.
        """
        names = self.model.names
        if name is None:
            return names[0]
        if name not in names:
            served = ", ".join(repr(n) for n in names)
            raise NotFoundError(
                f"The model {name!r} is not served here. Served: {served}.",
                param="model",
                code="model_not_found",
            )
        return name

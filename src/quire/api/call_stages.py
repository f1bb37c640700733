"""The stages of a call: the one list of those that are on. A stage that is off is not imported.

prompts for peers, or by them    --kv-share                   `quire.api.disaggregation`
answers that go on elsewhere     --journal, --gateway-key     `quire.api.resumption`
what a gateway is told           --gateway-key                `quire.api.gateway_reports`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.api.endpoint import CallStage, GenerateEndpoint, no_journal
from quire.api.settings import ApiSettings
from quire.api.state import ApiState
from quire.engine.frontend import Frontend
from quire.http.account import USAGE_PATH, check_gateway_key
from quire.http.cache_messages import CACHE_PATH

if TYPE_CHECKING:
    from quire.api.disaggregation import Disaggregation
    from quire.api.gateway_reports import GatewayReports
    from quire.api.journal import Journal
    from quire.api.resumption import Resumption

STREAM_PATH = "/v1/streams/{stream_id}"


@dataclass(frozen=True, slots=True)
class CallStages:
    """Those of one app."""

    resumption: Resumption | None = None
    reports: GatewayReports | None = None
    disaggregation: Disaggregation | None = None

    @classmethod
    def of(
        cls,
        frontend: Frontend,
        settings: ApiSettings,
        now: Callable[[], float],
        unix_time: Callable[[], float],
    ) -> CallStages:
        """Return the stages that ``settings`` turn on.

        Raises:
            ConfigError: the journal's folder cannot be used.
        """
        key, folder = settings.gateway_key, settings.journal_dir
        disaggregation = None
        if settings.shared_cache is not None:
            from quire.api.disaggregation import Disaggregation

            disaggregation = Disaggregation(settings.shared_cache)
        if key is None and folder is None:
            return cls(disaggregation=disaggregation)
        from quire.api.resumption import Resumption

        journal = None
        if folder is not None:
            from quire.api.journal import Journal

            journal = Journal(folder, settings.journal_bytes, now, lambda: frontend.state == "ready")
        resumption = Resumption(journal, key)
        if key is None:
            return cls(resumption, disaggregation=disaggregation)
        from quire.api.gateway_reports import GatewayReports

        return cls(resumption, GatewayReports(frontend, key, unix_time), disaggregation)

    @property
    def journal(self) -> Journal | None:
        return None if self.resumption is None else self.resumption.journal

    def listed(self) -> tuple[CallStage, ...]:
        """Return them in the order in which a call passes them."""
        stages = (self.disaggregation, self.resumption, self.reports)
        return tuple(stage for stage in stages if stage is not None)

    def routes(self, state: ApiState, endpoints: Mapping[str, GenerateEndpoint]) -> list[Route]:
        """Return the routes of the stages; of one that is off, the answer says how it is turned on."""
        routes = [
            Route(USAGE_PATH, _no_gateway if self.reports is None else self.reports.finished.show),
            Route(CACHE_PATH, _no_gateway if self.reports is None else self.reports.cache.show),
        ]
        if self.resumption is None:
            return [*routes, Route(STREAM_PATH, _no_streams, methods=["GET"])]
        from quire.api.resumption import StreamEndpoint

        endpoint = StreamEndpoint(state, self.resumption, endpoints)
        return [*routes, Route(STREAM_PATH, endpoint, methods=["GET"])]


async def _no_gateway(request: Request) -> Response:
    """For a gateway with the key of ``--gateway-key``."""
    check_gateway_key(request.scope, None)
    raise AssertionError


async def _no_streams(request: Request) -> Response:
    """The rest of a stream of the journal, from behind ``Last-Event-ID``; without that header, the whole of it."""
    raise no_journal()

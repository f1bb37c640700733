"""OpenTelemetry spans of requests, continuing the client's W3C ``traceparent`` (extra ``otel``).

    llm_request   arrival … last token        (child of the client's span, if it sent one)
    ├── queue     arrival … first admission
    ├── prefill   admission … first token
    └── decode    first token … last token

Spans are made after a request has ended, from the times of its metrics, so they cost nothing per token. Attributes have
the names of the GenAI conventions, which vLLM uses too (``gen_ai.…``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.extras import needs

SERVICE_NAME = "quire"
_HEADERS = (b"traceparent", b"tracestate")


@dataclass(frozen=True, slots=True)
class RequestPhases:
    """The times of one request (seconds of one monotonic clock) and how it ended."""

    arrival_s: float
    admitted_s: float | None  # None: rejected, or aborted while it waited
    first_s: float | None  # None: no token
    end_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    finish_reasons: tuple[str, ...]  # per sequence, in the order in which they ended


class RequestTracer:
    """Turns finished requests into spans of a provider."""

    def __init__(self, provider: Any, now: Callable[[], float], unix_time: Callable[[], float]) -> None:
        """``provider``: a `TracerProvider` of the SDK. ``now`` is the clock of `RequestPhases`.

        Raises:
            ConfigError: the extra ``otel`` is not installed.
        """
        self._otel = _Otel()
        self._provider = provider
        self._tracer = provider.get_tracer("quire")
        self._now = now
        self._unix_time = unix_time

    @classmethod
    def to(
        cls, endpoint: str, now: Callable[[], float], unix_time: Callable[[], float], version: str
    ) -> RequestTracer:
        """Export over OTLP/HTTP to ``endpoint``, e.g. http://localhost:4318/v1/traces.

        Raises:
            ConfigError: the extra ``otel`` is not installed.
        """
        return cls(_exporting_provider(endpoint, version), now, unix_time)

    def follow(
        self, headers: Mapping[str, str], attributes: Mapping[str, Any]
    ) -> Callable[[RequestPhases], None]:
        """Return the function to call when the request has ended. ``headers``: traceparent and tracestate, if any."""
        parent = self._otel.extract(dict(headers))
        return lambda phases: self._record(parent, attributes, phases)

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()

    def _record(self, parent: Any, attributes: Mapping[str, Any], phases: RequestPhases) -> None:
        offset_s = self._unix_time() - self._now()

        def ns(time_s: float) -> int:
            return int((time_s + offset_s) * 1e9)

        span = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=self._otel.server,
            start_time=ns(phases.arrival_s),
            attributes={k: v for k, v in attributes.items() if v is not None} | _measured(phases),
        )
        inside = self._otel.within(span, parent)
        for name, start_s, end_s in _children(phases):
            self._tracer.start_span(name, context=inside, start_time=ns(start_s)).end(end_time=ns(end_s))
        if "error" in phases.finish_reasons:
            span.set_status(self._otel.failed)
        span.end(end_time=ns(phases.end_s))


def trace_headers(headers: Any) -> dict[str, str]:
    """Return those of an ASGI scope's headers that name the client's span."""
    return {k.decode(): v.decode("latin-1") for k, v in headers if k in _HEADERS}


def _children(phases: RequestPhases) -> list[tuple[str, float, float]]:
    """Return (name, start, end) of the phases that the request reached; the last one lasts until its end."""
    names = ("queue", "prefill", "decode")
    starts = [phases.arrival_s, phases.admitted_s, phases.first_s]
    known = [(name, start) for name, start in zip(names, starts, strict=True) if start is not None]
    ends = [*(start for _, start in known[1:]), phases.end_s]
    return [(name, start, max(start, end)) for (name, start), end in zip(known, ends, strict=True)]


def _measured(phases: RequestPhases) -> dict[str, Any]:
    values: dict[str, Any] = {
        "gen_ai.usage.prompt_tokens": phases.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": phases.num_output_tokens,
        "gen_ai.latency.e2e": phases.end_s - phases.arrival_s,
        "gen_ai.response.finish_reasons": list(phases.finish_reasons),
    }
    if phases.admitted_s is not None:
        values["gen_ai.latency.time_in_queue"] = phases.admitted_s - phases.arrival_s
    if phases.first_s is not None:
        values["gen_ai.latency.time_to_first_token"] = phases.first_s - phases.arrival_s
    return values


class _Otel:
    """The parts of opentelemetry that are used, imported when a tracer is made."""

    def __init__(self) -> None:
        with needs("otel", "--otlp-traces-endpoint"):
            from opentelemetry import trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        self.extract = TraceContextTextMapPropagator().extract
        self.within = trace.set_span_in_context
        self.server = trace.SpanKind.SERVER
        self.failed = trace.Status(trace.StatusCode.ERROR)


def _exporting_provider(endpoint: str, version: str) -> Any:
    with needs("otel", "--otlp-traces-endpoint"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    resource = Resource.create({"service.name": SERVICE_NAME, "service.version": version})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider

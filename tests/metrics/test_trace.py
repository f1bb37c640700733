"""Spans of requests, read back from the SDK's in-memory exporter."""

from __future__ import annotations

import gzip
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.api.asgi_client import Api

from quire.api.app import create_app
from quire.api.settings import ApiSettings
from quire.errors import ConfigError
from quire.metrics.trace import RequestPhases, RequestTracer

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def tracer_to(exporter: InMemorySpanExporter) -> RequestTracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return RequestTracer(provider, now=lambda: 100.0, unix_time=lambda: 1_000_100.0)


def by_name(exporter: InMemorySpanExporter) -> dict[str, Any]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_and_its_phases(exporter: InMemorySpanExporter) -> None:
    end = tracer_to(exporter).follow(
        {"traceparent": TRACEPARENT}, {"gen_ai.request.id": "x", "gen_ai.request.n": None}
    )
    end(RequestPhases(10.0, 10.5, 11.5, 14.0, 7, 5, ("length",)))
    spans = by_name(exporter)
    root = spans["llm_request"]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    assert (root.start_time, root.end_time) == (1_000_010 * 10**9, 1_000_014 * 10**9)
    for name, start_s, end_s in (("queue", 10.0, 10.5), ("prefill", 10.5, 11.5), ("decode", 11.5, 14.0)):
        span = spans[name]
        assert span.parent.span_id == root.context.span_id
        assert span.start_time == pytest.approx((1_000_000 + start_s) * 1e9)
        assert span.end_time == pytest.approx((1_000_000 + end_s) * 1e9)
    assert root.attributes["gen_ai.latency.time_to_first_token"] == 1.5
    assert root.attributes["gen_ai.usage.completion_tokens"] == 5
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert "gen_ai.request.n" not in root.attributes
    assert root.status.is_ok or root.status.is_unset


def test_phases_that_were_not_reached_are_not_there(exporter: InMemorySpanExporter) -> None:
    tracer_to(exporter).follow({}, {})(RequestPhases(10.0, None, None, 12.0, 7, 0, ("error",)))
    spans = by_name(exporter)
    assert set(spans) == {"llm_request", "queue"}
    assert spans["llm_request"].parent is None
    assert not spans["llm_request"].status.is_ok


def test_the_api_takes_a_traceparent(exporter: InMemorySpanExporter) -> None:
    api = Api()
    api.app = create_app(api.frontend, ApiSettings(), tracer=tracer_to(exporter))  # type: ignore[arg-type]
    body = {"prompt": "Hi", "max_tokens": 4, "temperature": 0.25}
    assert api.post("/v1/completions", body, headers={"traceparent": TRACEPARENT}).status_code == 200
    root = by_name(exporter)["llm_request"]
    assert f"{root.context.trace_id:032x}" == TRACE
    assert root.attributes["gen_ai.request.temperature"] == 0.25
    assert root.attributes["gen_ai.usage.completion_tokens"] == 4
    assert root.attributes["gen_ai.request.id"].startswith("cmpl-")
    assert set(by_name(exporter)) == {"llm_request", "queue", "prefill", "decode"}


def test_a_missing_extra_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'quire-llm\[otel\]'"):
        RequestTracer.to("http://localhost:1/v1/traces", lambda: 0.0, lambda: 0.0, "1")


def test_spans_go_out_over_otlp() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[bytes] = []

    class Sink(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Sink) as sink:
        thread = threading.Thread(target=sink.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{sink.server_address[1]}/v1/traces"
        tracer = RequestTracer.to(url, lambda: 1.0, lambda: 1.0, "0.1")
        tracer.follow({}, {})(RequestPhases(0.1, 0.2, 0.3, 0.4, 1, 2, ("stop",)))
        tracer.close()
        sink.shutdown()
        thread.join()
    spans = ExportTraceServiceRequest.FromString(got[0]).resource_spans[0]
    assert {s.name for s in spans.scope_spans[0].spans} == {"llm_request", "queue", "prefill", "decode"}
    assert {"service.name": "quire"}.items() <= {
        a.key: a.value.string_value for a in spans.resource.attributes
    }.items()

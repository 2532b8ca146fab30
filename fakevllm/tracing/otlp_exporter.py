"""The exporter that sends spans with OpenTelemetry's SDK, as OTLP over HTTP.

This module imports OpenTelemetry, which is an extra. Import it only if spans are sent.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fakevllm.tracing.collector_address import hide_credentials
from fakevllm.tracing.span_plan import CONVENTIONS, PlannedSpan, RequestSpans

SCHEMA_URL = f"https://opentelemetry.io/schemas/{CONVENTIONS}"
SERVICE = "fakevllm"
MAX_CAUSE_CHARS = 300
_UNKNOWN_SERVICE = "unknown_service"
"""Beginning of the name that the SDK gives to a service without a name."""
_PROPAGATOR = TraceContextTextMapPropagator()


class OtlpExporter:
    """The connection to the collector. Use it in one thread only.

    The environment variables of OpenTelemetry's SDK have their usual effect, for example
    `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_TRACES_SAMPLER` and `OTEL_SERVICE_NAME`.
    """

    def __init__(self, url: str, version: str) -> None:
        """Create the exporter. No connection is opened yet. `version` is the proxy's version."""
        self._ended = _EndedSpans()
        self._url = url
        self._exporter = OTLPSpanExporter(endpoint=url)
        provider = TracerProvider(resource=_resource(version), shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer(SERVICE, version, schema_url=SCHEMA_URL)
        self._messages = _LastMessages()
        _redirect_log(self._messages)

    def export(self, batch: Sequence[RequestSpans]) -> str | None:
        """Send the spans. Return the cause of a failure, or None."""
        for spans in batch:
            _make(self._tracer, spans)
        ended = self._ended.take()
        self._messages.clear()
        if not ended:  # the sampler has left them out
            return None
        if self._exporter.export(ended) is SpanExportResult.SUCCESS:
            return None
        cause = self._messages.first or "the exporter gives no reason"
        return hide_credentials(cause, self._url)[:MAX_CAUSE_CHARS]

    def close(self) -> None:
        self._exporter.shutdown()


class _EndedSpans(SpanProcessor):
    """Collects the spans that the SDK has ended."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        """Return the spans that have ended since the last call."""
        spans, self._spans = self._spans, []
        return spans


class _LastMessages(logging.Handler):
    """Keeps the first message that the SDK logs during an export. It replaces the SDK's log lines,
    one of which would be written for each attempt."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.first: str | None = None

    def emit(self, record: logging.LogRecord) -> None:
        self.first = self.first or record.getMessage()

    def clear(self) -> None:
        self.first = None


def _redirect_log(handler: logging.Handler) -> None:
    logger = logging.getLogger("opentelemetry")
    logger.handlers = [handler]
    logger.propagate = False


def _resource(version: str) -> Resource:
    resource = Resource.create({SERVICE_VERSION: version})
    name = str(resource.attributes.get(SERVICE_NAME) or _UNKNOWN_SERVICE)
    if name.startswith(_UNKNOWN_SERVICE):
        return resource.merge(Resource({SERVICE_NAME: SERVICE}))
    return resource


def _make(tracer: Tracer, spans: RequestSpans) -> None:
    """Make the spans of a request with the SDK, which gives them to its processors."""
    request = _started(tracer, spans.request, _PROPAGATOR.extract(spans.parent))
    context = set_span_in_context(request)
    for child in spans.children:
        _end(_started(tracer, child, context), child)
    _end(request, spans.request)


def _started(tracer: Tracer, span: PlannedSpan, context: Context) -> Span:
    return tracer.start_span(
        span.name,
        context,
        kind=SpanKind[span.kind],
        attributes=span.attributes,
        start_time=span.started_ns,
    )


def _end(span: Span, planned: PlannedSpan) -> None:
    if planned.is_error:
        span.set_status(StatusCode.ERROR)
    span.end(planned.ended_ns)

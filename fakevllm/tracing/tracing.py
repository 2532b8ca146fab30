"""Begin the traces of requests, and hand the ended ones to the thread that sends their spans."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from importlib.metadata import version

from fakevllm.config.tracing import TracingSection
from fakevllm.ledger.redacted_records import RecordRedactor
from fakevllm.tracing.collector_address import (
    hide_credentials,
    traces_url,
    without_credentials,
)
from fakevllm.tracing.request_trace import (
    FinishedTrace,
    RequestFacts,
    RequestTrace,
    sampling_fields,
)
from fakevllm.tracing.span_plan import RequestSpans, SpanPlanner, Upstream
from fakevllm.tracing.span_sender import MAX_QUEUED, MAX_QUEUED_WITH_CONTENT, SpanSender
from fakevllm.tracing.trace_redaction import redacted, without_content
from fakevllm_adapters.formats.base import Json

log = logging.getLogger("fakevllm.tracing")

_PARENT_HEADERS = ("traceparent", "tracestate")
_NOT_INSTALLED = (
    "OpenTelemetry spans are not sent to %s, because the extra is not installed: install it with "
    "`pip install -e '.[otel]'` in the clone of fakevllm"
)


class Tracing:
    """Makes OpenTelemetry spans of the apps' requests."""

    def __init__(self, sender: SpanSender, *, with_content: bool) -> None:
        self._sender = sender
        self._with_content = with_content

    def begin(
        self, model: str, body: Json, headers: Mapping[bytes, bytes], *, is_text_completion: bool
    ) -> RequestTrace:
        """Begin the trace of a request. `model` is the model name as the app sent it, `body` is the
        request in the upstream's format, and `headers` are the app's headers."""
        parent = {
            name: headers[name.encode()].decode("latin-1")
            for name in _PARENT_HEADERS
            if name.encode() in headers
        }
        messages = None
        if self._with_content:
            messages = body.get("prompt" if is_text_completion else "messages")
        sampling = sampling_fields(body)
        facts = RequestFacts(model, sampling, is_text_completion, messages, parent)
        return RequestTrace(facts, self._finish)

    @property
    def counts(self) -> dict[str, int]:
        """Number of requests by what became of their spans."""
        return self._sender.counts

    async def close(self) -> None:
        """Send the last spans, for a few seconds at most."""
        await asyncio.to_thread(self._sender.close)

    def _finish(self, trace: FinishedTrace) -> None:
        self._sender.put(trace if self._with_content else without_content(trace))


def open_tracing(
    settings: TracingSection,
    environment: Mapping[str, str],
    redactor: RecordRedactor,
    engine_url: str,
    fallback_url: str | None,
) -> Tracing | None:
    """Start to send spans. Return None if no collector is configured. If OpenTelemetry is not
    installed, log this and return None, because apps must be served all the same.

    `environment` has the environment variables of OpenTelemetry. The URLs are those of the servers
    that the proxy calls.
    """
    url = traces_url(settings.url, environment)
    if url is None:
        return None
    shown_url = without_credentials(url)
    try:
        from fakevllm.tracing.otlp_exporter import OtlpExporter
    except ImportError:
        log.warning(_NOT_INSTALLED, shown_url)
        return None
    try:
        exporter = OtlpExporter(url, version("fakevllm"))
    except Exception as error:  # isolates: OpenTelemetry's variables may be for another program
        cause = hide_credentials(str(error), url)
        log.warning("OpenTelemetry spans are not sent to %s: %s", shown_url, cause)
        return None
    fallback = None if fallback_url is None else Upstream.of_url(fallback_url)
    planner = SpanPlanner(Upstream.of_url(engine_url), fallback, with_content=settings.content)

    def plan(trace: FinishedTrace) -> RequestSpans:
        return planner.spans(redacted(trace, redactor))

    max_queued = MAX_QUEUED_WITH_CONTENT if settings.content else MAX_QUEUED
    sender = SpanSender(plan, exporter, shown_url, max_queued=max_queued)
    log.info(
        "sending OpenTelemetry spans to %s, %s",
        shown_url,
        "with redacted content" if settings.content else "without content",
    )
    return Tracing(sender, with_content=settings.content)

"""Tests of the spans that a collector gets from OpenTelemetry's SDK."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from fakevllm.tracing.span_plan import RequestSpans, SpanPlanner, Upstream
from tests.proxy.tracing.finished_traces import PARENT, call, trace
from tests.proxy.tracing.otlp_collector import OtlpCollector

pytest.importorskip("opentelemetry.sdk", reason="needs `pip install -e '.[otel]'`")

from fakevllm.tracing.otlp_exporter import OtlpExporter

TRACE_ID, APP_SPAN_ID = PARENT.split("-")[1:3]


def planned(parent: str | None = PARENT) -> RequestSpans:
    facts = replace(trace().facts, parent={} if parent is None else {"traceparent": parent})
    failed = call(2, status=500, answer=None)
    ended = trace(facts=facts, calls=(call(0), failed))
    return SpanPlanner(Upstream("gpu-box", 1), None, with_content=False).spans(ended)


@pytest.fixture(autouse=True)
def log_of_the_sdk() -> Iterator[None]:
    """Restore the logger that the exporter redirects."""
    logger = logging.getLogger("opentelemetry")
    handlers, propagate = logger.handlers, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate


def test_the_app_s_span_is_the_parent_and_all_spans_are_in_its_trace() -> None:
    with OtlpCollector() as collector:
        exporter = OtlpExporter(f"{collector.url}/v1/traces", "1.2.3")
        assert exporter.export([planned()]) is None
        exporter.close()
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}
    [request] = collector.of_kind("SERVER")
    assert request.parent_id == APP_SPAN_ID and not request.is_error
    children = [span for span in collector.spans if span is not request]
    assert {span.parent_id for span in children} == {request.span_id}
    assert [span.is_error for span in collector.of_kind("CLIENT")] == [False, True]
    assert request.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert request.duration_s == pytest.approx(560e-9)
    assert collector.schemas == {"https://opentelemetry.io/schemas/1.41.0"}
    assert collector.resource["service.name"] == "fakevllm"
    assert collector.resource["service.version"] == "1.2.3"
    assert collector.paths == {"/v1/traces"}


@pytest.mark.parametrize("parent", [None, "nonsense", "00-0-0-01"])
def test_without_a_valid_parent_a_request_begins_a_trace_of_its_own(parent: str | None) -> None:
    with OtlpCollector() as collector:
        exporter = OtlpExporter(f"{collector.url}/v1/traces", "1")
        assert exporter.export([planned(parent), planned(parent)]) is None
    requests = collector.of_kind("SERVER")
    assert [span.parent_id for span in requests] == ["", ""]
    assert requests[0].trace_id != requests[1].trace_id


def test_an_app_that_does_not_sample_its_trace_gets_no_spans() -> None:
    with OtlpCollector() as collector:
        exporter = OtlpExporter(f"{collector.url}/v1/traces", "1")
        assert exporter.export([planned(PARENT[:-1] + "0")]) is None
    assert not collector.raw


def test_the_environment_names_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-proxy")
    with OtlpCollector() as collector:
        OtlpExporter(f"{collector.url}/v1/traces", "1").export([planned()])
    assert collector.resource["service.name"] == "my-proxy"


def test_a_collector_that_refuses_is_the_cause_and_the_sdk_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with OtlpCollector(status=401) as collector:
        cause = OtlpExporter(f"{collector.url}/v1/traces", "1").export([planned()])
    assert cause is not None and "401" in cause
    assert not caplog.messages


def test_a_collector_that_hangs_is_given_up_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with OtlpCollector(hangs=True) as collector:
        assert OtlpExporter(f"{collector.url}/v1/traces", "1").export([planned()]) is not None


def test_the_cause_says_that_a_collector_refuses_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The SDK logs the cause when it tries again, after a second. A shorter time leaves it out.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "4")
    with OtlpCollector() as collector:
        url = collector.url
    cause = OtlpExporter(f"{url}/v1/traces?key=secret", "1").export([planned()])
    assert cause is not None and "refused" in cause and "secret" not in cause

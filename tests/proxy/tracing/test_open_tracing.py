"""Tests of a proxy that begins to send spans, or cannot send any."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest

from fakevllm.config.tracing import TracingSection
from fakevllm.ledger.redacted_records import RecordRedactor
from fakevllm.tracing.tracing import Tracing, open_tracing
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.privacy.settings import PrivacySettings

REDACTOR = RecordRedactor(RedactionInUse(PrivacySettings()))
OTLP = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
EXPORTER = "fakevllm.tracing.otlp_exporter"
INSTALL = "install it with `pip install -e '.[otel]'` in the clone of fakevllm"


def opened(url: str | None = None, environment: dict[str, str] | None = None) -> Tracing | None:
    settings = TracingSection(url=url)
    return open_tracing(settings, environment or {}, REDACTOR, "http://engine:1", None)


@pytest.fixture(autouse=True)
def log_of_the_sdk() -> Iterator[None]:
    """Restore the logger that the exporter redirects."""
    logger = logging.getLogger("opentelemetry")
    handlers, propagate = logger.handlers, logger.propagate
    yield
    logger.handlers, logger.propagate = handlers, propagate


def test_without_a_collector_nothing_is_sent_and_nothing_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert opened() is None and not caplog.messages


def test_without_the_extra_one_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(sys.modules, EXPORTER, raising=False)
    monkeypatch.setitem(sys.modules, OTLP, None)
    address = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://me:secret@collector:4318"}
    assert opened(environment=address) is None
    [line] = caplog.messages
    assert line.startswith("OpenTelemetry spans are not sent to http://collector:4318/v1/traces")
    assert line.endswith(INSTALL)


def test_a_wrong_variable_of_opentelemetry_is_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip(OTLP, reason="needs `pip install -e '.[otel]'`")
    monkeypatch.setenv("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "mine")
    assert opened("http://127.0.0.1:9") is None
    [line] = [one for one in caplog.messages if "not sent" in one]
    assert "mine" in line

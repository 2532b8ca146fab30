"""Tests of the decision whether spans are sent, and to which address."""

from __future__ import annotations

import pytest

from fakevllm.tracing.collector_address import traces_url

BASE = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


@pytest.mark.parametrize(
    ("url", "environment", "address"),
    [
        (None, {}, None),
        (None, {BASE: ""}, None),
        ("http://a:1", {}, "http://a:1/v1/traces"),
        ("http://a:1/", {}, "http://a:1/v1/traces"),
        ("https://a/otel/v1/traces", {}, "https://a/otel/v1/traces"),
        (None, {BASE: "http://a:1/x/"}, "http://a:1/x/v1/traces"),
        (None, {BASE: "http://a:1", TRACES: "http://b/own"}, "http://b/own"),
        ("http://a:1", {BASE: "http://b", TRACES: "http://b/own"}, "http://a:1/v1/traces"),
        ("http://a:1", {"OTEL_SDK_DISABLED": "true"}, None),
        (None, {BASE: "http://a:1", "OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_the_setting_wins_over_the_variables_of_opentelemetry(
    url: str | None, environment: dict[str, str], address: str | None
) -> None:
    assert traces_url(url, environment) == address

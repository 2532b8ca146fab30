"""The section `[tracing]` of fakevllm.toml: OpenTelemetry spans of the apps' requests."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from fakevllm.config.base import Section
from fakevllm.config.http_address import checked_http_url


class TracingSection(Section):
    """The section `[tracing]`: OpenTelemetry spans of the apps' requests."""

    url: Annotated[str, AfterValidator(checked_http_url)] | None = None
    """URL of an OpenTelemetry collector that accepts OTLP over HTTP, with or without `/v1/traces`.
    None means the URL in OpenTelemetry's own environment variables, such as
    `OTEL_EXPORTER_OTLP_ENDPOINT`. If they have none either, no spans are sent."""
    content: bool = False
    """Whether spans contain the messages of requests and the answers, redacted as in the ledger."""

"""The decision whether spans are sent, and to which address. This module does no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlsplit

TRACES_PATH = "/v1/traces"


def traces_url(url: str | None, environment: Mapping[str, str]) -> str | None:
    """Return the address to which spans are sent, or None if no spans are sent. `url` is the
    setting `tracing.url`, which wins over OpenTelemetry's environment variables.

    >>> traces_url("http://127.0.0.1:4318", {}), traces_url(None, {})
    ('http://127.0.0.1:4318/v1/traces', None)
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if url is None:
        if environment.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
            return None
        if own := environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "").strip():
            return own
        url = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    base = url.rstrip("/").removesuffix(TRACES_PATH)
    return f"{base}{TRACES_PATH}" if base else None


def hide_credentials(text: str, url: str) -> str:
    """Return the text without the user name, the password and the query of the address, for log
    lines.

    >>> hide_credentials("no answer: /v1/traces?key=secret", "http://host/v1/traces?key=secret")
    'no answer: /v1/traces?...'
    """
    parts = urlsplit(url)
    for secret in (parts.query, parts.password, parts.username):
        if secret:
            text = text.replace(secret, "...")
    return text


def without_credentials(url: str) -> str:
    """Return the address without a user name, a password and a query, for log lines.

    >>> without_credentials("https://me:secret@host:4318/v1/traces?key=secret")
    'https://host:4318/v1/traces'
    """
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

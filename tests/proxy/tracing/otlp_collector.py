"""A collector of OpenTelemetry spans, which listens on a free port of this machine."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import pytest

pytest.importorskip(
    "opentelemetry.exporter.otlp.proto.http", reason="needs `pip install -e '.[otel]'`"
)

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)

KINDS = {1: "INTERNAL", 2: "SERVER", 3: "CLIENT"}
HANG_S = 60.0


@dataclass(frozen=True, slots=True)
class SeenSpan:
    """A span as the collector got it."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: Mapping[str, Any]
    duration_s: float
    is_error: bool


class OtlpCollector:
    """A collector that keeps all spans. With a `status`, it refuses them. With `hangs`, it accepts
    connections and never answers."""

    def __init__(self, *, status: int = 200, hangs: bool = False) -> None:
        self.status = status
        self.hangs = hangs
        self.raw: list[bytes] = []
        """Bodies of all requests."""
        self.paths: set[str] = set()
        self.resource: dict[str, Any] = {}
        self.schemas: set[str] = set()
        self._spans: list[SeenSpan] = []
        self._released = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.paths.add(self.path)
                if collector.hangs:
                    collector._released.wait(HANG_S)
                if collector.status == 200:
                    collector._keep(body)
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def spans(self) -> list[SeenSpan]:
        return list(self._spans)

    def of_kind(self, kind: str) -> list[SeenSpan]:
        return [span for span in self._spans if span.kind == kind]

    def _keep(self, body: bytes) -> None:
        self.raw.append(body)
        message = ExportTraceServiceRequest.FromString(body)
        for group in message.resource_spans:
            self.resource = _values(group.resource.attributes)
            for scope in group.scope_spans:
                self.schemas.add(scope.schema_url)
                self._spans += [_seen(span) for span in scope.spans]


def _seen(span: Any) -> SeenSpan:
    return SeenSpan(
        span.name,
        KINDS[span.kind],
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        _values(span.attributes),
        (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
        span.status.code == 2,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)

"""OpenTelemetry spans of the apps' requests, by the GenAI semantic conventions.

* `request_trace` notes times while a request is answered: of its model calls and hook calls.
* `span_plan` is pure. It makes a request's spans from these notes and the ledger's record.
* `message_parts` is pure. It writes messages as the conventions do.
* `trace_redaction` redacts what a request's spans may contain.
* `collector_address` decides whether spans are sent, and to which address.
* `span_sender` is the thread that makes the spans and sends them.
* `otlp_exporter` is the only module that imports OpenTelemetry. It is imported only if spans are
  sent.
* `tracing` opens and closes these parts.

Spans have no texts of requests and answers unless the setting `tracing.content` is on. No request
waits for a span. If the collector is slow or away, spans are lost and counted.
"""

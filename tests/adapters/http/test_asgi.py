"""Functions on ASGI requests."""

from __future__ import annotations

from fakevllm_adapters.http.asgi import engine_headers
from fakevllm_adapters.protocol.swarm import SIBLING_HEADER


def test_headers_that_control_an_engine_are_not_relayed() -> None:
    controls = [
        *("X-data-parallel-rank", "X-Vllm-Priority", "X-Session-ID", SIBLING_HEADER),
        *("endpoint-load-metrics-format", "Authorization", "x-api-key", "Cookie", "Host"),
        *("Connection", "Transfer-Encoding", "Forwarded", "X-Forwarded-For", "Expect"),
    ]
    headers = {name.lower().encode(): b"1" for name in controls}
    assert engine_headers(headers) == {}
    headers |= {b"content-type": b"application/json", b"x-request-id": b"r"}
    assert engine_headers(headers) == {"Content-Type": "application/json", "X-Request-Id": "r"}

"""A collector gets the spans of a real proxy's requests, and no collector disturbs the apps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Process, Processes, free_port, wait_until
from tests.proxy.tracing.otlp_collector import OtlpCollector, SeenSpan

CHAT = "/v1/chat/completions"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
MAIL = "ada@example.com"
SUBMIT = "def on_user_submit_new_requests(request_id, task):\n    return 3\n"
WAIT_S = 20.0
STOP_S = 10.0
"""Seconds within which a proxy stops, also with a collector that hangs."""


def started(
    processes: Processes, url: str | None, settings: str = "", folder: str = "a"
) -> Process:
    own = processes.folder / f"config-{folder}"
    hooks = write_hooks(own / "hooks", PREFER_YES, SUBMIT)
    address = "" if url is None else f'url = "{url}"\n'
    config = own / "fakevllm.toml"
    config.write_text(f"[tracing]\n{address}{settings}")
    server = processes.server("--backend", "fake", folder=f"server-{folder}")
    arguments = ("--hooks", str(hooks), "--n", "3", "--config", str(config))
    return processes.proxy(server, *arguments, folder=f"proxy-{folder}")


def ask(proxy: Process, text: str = "Say yes.", **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    body = {"model": "fake", "messages": [{"role": "user", "content": text}]} | fields
    reply = httpx.post(f"{proxy.url}{CHAT}", json=body, headers=headers, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply


def request_spans(collector: OtlpCollector, num: int) -> list[SeenSpan]:
    wait_until(lambda: len(collector.of_kind("SERVER")) >= num, WAIT_S, "the spans of the requests")
    return collector.of_kind("SERVER")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_group_s_spans_are_in_the_app_s_trace_and_have_no_content(
    tmp_path: Path, is_streamed: bool
) -> None:
    with OtlpCollector() as collector, Processes(tmp_path) as processes:
        proxy = started(processes, collector.url)
        text = "A question that must stay here."
        fields = {"stream": True, "stream_options": {"include_usage": True}} if is_streamed else {}
        reply = ask(proxy, text, temperature=0.5, headers=PARENT, **fields)
        [request] = request_spans(collector, 1)
        group = httpx.get(f"{proxy.url}/fakevllm/groups/{reply.headers['x-fakevllm-group']}")
    children = [span for span in collector.spans if span.parent_id == request.span_id]
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}
    assert request.parent_id == "b7ad6b7169203331" and request.name == "chat fake"
    assert sorted(span.name for span in children) == [
        *["chat fake"] * 3,
        "on_compute_relative_reward",
        "on_user_submit_new_requests",
    ]
    recorded = group.json()
    attributes = request.attributes
    assert attributes["fakevllm.group.id"] == recorded["group_id"]
    assert attributes["fakevllm.served.index"] == recorded["served_index"]
    assert attributes["gen_ai.conversation.id"] == recorded["session_id"]
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.request.stream"] is is_streamed
    rewards = [one["reward"] for one in recorded["siblings"]]
    calls = sorted(
        collector.of_kind("CLIENT"), key=lambda span: span.attributes["fakevllm.sibling.index"]
    )
    assert [span.attributes["fakevllm.sibling.reward"] for span in calls] == rewards
    assert [span.attributes["gen_ai.request.temperature"] for span in calls] == [0.5, 1.0, 1.0]
    assert all(span.attributes["gen_ai.response.model"] == "fake" for span in calls)
    assert all(span.attributes["gen_ai.usage.output_tokens"] > 0 for span in calls)
    ports = {span.attributes["server.port"] for span in calls}
    assert ports == {processes_port(proxy)}
    sent = b"".join(collector.raw)
    assert text.encode() not in sent
    assert not any("messages" in name for span in collector.spans for name in span.attributes)


def processes_port(proxy: Process) -> int:
    """Return the port of the server that a proxy uses, from the proxy's log."""
    return int(proxy.log.partition("swarm server http://127.0.0.1:")[2].partition(",")[0])


def test_content_is_sent_if_it_is_asked_for_and_is_redacted(tmp_path: Path) -> None:
    settings = 'content = true\n[privacy]\nredact = ["email"]\n'
    with OtlpCollector() as collector, Processes(tmp_path) as processes:
        proxy = started(processes, f"{collector.url}/v1/traces", settings)
        ask(proxy, f"I am {MAIL}, and I like the sea.", headers=PARENT)
        [request] = request_spans(collector, 1)
    [message] = orjson.loads(request.attributes["gen_ai.input.messages"])
    text = message["parts"][0]["content"]
    assert text.startswith("I am ") and text.endswith(", and I like the sea.")
    [answer] = orjson.loads(request.attributes["gen_ai.output.messages"])
    assert answer["role"] == "assistant" and answer["parts"][0]["content"]
    outputs = [
        span for span in collector.of_kind("CLIENT") if "gen_ai.output.messages" in span.attributes
    ]
    assert len(outputs) == 3
    assert MAIL.encode() not in b"".join(collector.raw)


def test_a_request_that_must_not_be_stored_has_no_spans(tmp_path: Path) -> None:
    with OtlpCollector() as collector, Processes(tmp_path) as processes:
        proxy = started(processes, collector.url, "content = true\n")
        ask(proxy, "Nobody may know this.", headers={"X-Fakevllm-Store": "none"})
        ask(proxy, "Everybody may know this.")
        request_spans(collector, 1)
        proxy.stop()
    assert len(collector.of_kind("SERVER")) == 1
    assert b"Nobody may know" not in b"".join(collector.raw)


def test_without_a_collector_that_answers_apps_are_served_and_the_proxy_stops(
    tmp_path: Path,
) -> None:
    away = f"http://127.0.0.1:{free_port()}"
    with (
        OtlpCollector(hangs=True) as hangs,
        OtlpCollector(status=403) as refuses,
        Processes(tmp_path) as processes,
    ):
        for folder, url in (("hang", hangs.url), ("away", away), ("refuse", refuses.url)):
            proxy = started(processes, url, folder=folder)
            before = time.monotonic()
            for _ in range(20):
                ask(proxy)
            assert time.monotonic() - before < WAIT_S
            if folder != "hang":
                wait_until(lambda proxy=proxy: "cannot be sent" in proxy.log, WAIT_S)
            before = time.monotonic()
            assert proxy.stop() == 0
            assert time.monotonic() - before < STOP_S
            lines = [line for line in proxy.log.splitlines() if "OpenTelemetry" in line]
            assert lines[0].endswith(f"{url}/v1/traces, without content")
            assert len(lines) <= 3 and "Traceback" not in proxy.log


def test_a_proxy_without_a_collector_does_not_import_opentelemetry(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        proxy = started(processes, None)
        ask(proxy)
        maps = Path(f"/proc/{proxy.pid}/maps").read_text()
        metrics = httpx.get(f"{proxy.url}/metrics").text
    assert "OpenTelemetry spans" not in proxy.log and "_upb" not in maps
    assert "fakevllm_traced_requests{" not in metrics

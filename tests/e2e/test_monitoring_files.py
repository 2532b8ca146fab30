"""The dashboard and the alert rules in deploy/ name only metrics and labels that a proxy has."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.deploy.monitoring_files import panel_queries, rule_queries
from tests.deploy.promql import page_series, unknown_names
from tests.e2e.processes import Process, Processes, wait_until
from tests.e2e.release_stack import JOB, Talk, proxy_flags, write_held_out
from tests.e2e.test_release_gate import GATED
from tests.proxy.web.test_arm_views import record_sessions

pytestmark = pytest.mark.slow


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def chat(proxy: Process, text: str, **fields: object) -> httpx.Response:
    body = {"model": "fake", "messages": [{"role": "user", "content": text}]} | fields
    return httpx.post(f"{proxy.url}/v1/chat/completions", json=body, timeout=30)


class SeenSeries:
    """The metrics and labels of all pages of a proxy so far. A gauge may show a label only for a
    moment, such as the evaluation of a candidate."""

    def __init__(self, proxy: Process) -> None:
        self._proxy = proxy
        self.labels: dict[str, frozenset[str]] = {}

    def read(self) -> str:
        """Read the page, and return it."""
        page = httpx.get(f"{self._proxy.url}/metrics", timeout=30).text
        for name, labels in page_series(page).items():
            self.labels[name] = self.labels.get(name, frozenset()) | labels
        return page

    def problems(self) -> dict[str, list[str]]:
        """Return the unknown names of each query that has some, by the title of the query."""
        return {
            query.title: found
            for query in (*panel_queries(), *rule_queries())
            if (found := list(unknown_names(query.expression, self.labels, query.shown_labels)))
        }


def test_each_query_names_metrics_and_labels_of_a_running_proxy(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    # A session is counted in the arms' gauges ten minutes after its last request.
    (processes.folder / "proxy").mkdir()
    record_sessions(processes.folder / "proxy")
    sections = GATED.format(rows=write_held_out(tmp_path))
    sections += '[alerts]\nurl = "http://127.0.0.1:9/"\n'  # the counts exist before an alert
    job = f'{JOB}filter_groups = "drop"\n'  # tied groups are dropped with a reason
    proxy = processes.proxy(server, *proxy_flags(tmp_path, sections, job=job))
    seen = SeenSeries(proxy)
    rated = {"id": chat(proxy, "How?").json()["id"], "thumbs": "up"}
    httpx.post(f"{proxy.url}/v1/feedback", json=rated, timeout=30).raise_for_status()
    talk = Talk(proxy)

    def all_are_known() -> bool:
        # Some series exist only while a candidate is evaluated, which takes two seconds.
        talk.ask()
        seen.read()
        chat(proxy, f"[[say a tie]] {talk.number}")
        seen.read()
        chat(proxy, f"[[say <tool_call>]] {talk.number}", tools=TOOLS)  # a broken tool call
        seen.read()
        return seen.problems() == {}

    wait_until(all_are_known, 60, lambda: f"these names in /metrics: {seen.problems()}")
    values = {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in seen.read().splitlines()
        if line.startswith("fakevllm_")
    }
    assert values["fakevllm_server_reachable"] == 1
    assert values["fakevllm_training_steps"] >= 1 <= values["fakevllm_weight_version"]
    states = [value for name, value in values.items() if name.startswith("fakevllm_engine_state{")]
    assert sorted(states) == [0, 0, 0, 0, 1]

    server.stop()
    wait_until(lambda: "fakevllm_server_reachable 0.0" in seen.read(), 20, "the missing server")
    assert "fakevllm_training_steps NaN" in seen.read()

"""A server that is restarted while its disk is full, with a proxy in front of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Process, Processes, free_port, wait_until

LIMIT_S = 40.0
SCRIPT = Path(__file__).with_name("full_disk_server.py")
CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "[[say hi]]"}]}

pytestmark = pytest.mark.slow


def start_server(processes: Processes) -> Process:
    port = free_port()
    run = processes.folder / "server"
    arguments = ["start", "--backend", "fake", "--port", str(port), "--run-dir", str(run)]
    server = Process("server", [str(SCRIPT), *arguments], port, run)
    return processes.adopt(server).wait_until_healthy()


def detail_of(server: Process) -> str:
    try:
        status = httpx.get(f"{server.url}/get_engine_status").json()
    except httpx.TransportError:
        return ""
    return status["engine_status_detail"] or ""


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_a_restart_on_a_full_disk_is_shown_and_ends_when_there_is_space(
    processes: Processes, yes_hooks: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    flag = processes.folder / "disk-is-full"
    monkeypatch.setenv("FAKE_FULL_DISK", str(flag))
    server = start_server(processes)
    proxy = processes.proxy(server, "--hooks", str(yes_hooks))
    if end == "kill":
        server.kill()
    else:
        assert server.stop() == 0
    flag.touch()
    server.start()
    wait_until(lambda: "disk is full" in detail_of(server), LIMIT_S, "the server to show the fault")
    health = httpx.get(f"{server.url}/health")
    assert (health.status_code, "disk is full" in health.json()["detail"]) == (503, True)
    wait_until(
        lambda: "start_engine: The request cannot be written" in proxy.log,
        LIMIT_S,
        "the proxy to show the fault",
    )
    assert httpx.get(f"{proxy.url}/health").status_code == 503
    stats = httpx.get(f"{proxy.url}/fakevllm/stats").json()
    assert "disk is full" in stats["engine"]["engine_status_detail"]
    flag.unlink()
    proxy.wait_until_healthy(LIMIT_S)
    assert httpx.get(f"{server.url}/health").status_code == 200
    answer = httpx.post(f"{proxy.url}/v1/chat/completions", json=CHAT, timeout=LIMIT_S)
    assert answer.json()["choices"][0]["message"]["content"] == "hi"

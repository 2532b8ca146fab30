"""Exit codes of servers and proxies that are told to stop in any state."""

from __future__ import annotations

import signal
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import STOP_GRACE_S, Processes, wait_until

SLOW: dict[str, Any] = {
    "model": "fake",
    "messages": [{"role": "user", "content": f"[[say {'a' * 500}]] [[slow 0.1]]"}],
    "stream": True,
}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_without_an_engine_exits_with_0_on_a_stop_signal(
    processes: Processes, number: signal.Signals
) -> None:
    server = processes.server("--backend", "fake")
    server.signal(number)
    wait_until(lambda: server.returncode is not None, STOP_GRACE_S, "the server to exit")
    assert server.returncode == 0


def test_server_and_proxy_exit_with_0_on_sigterm_while_they_serve(
    processes: Processes, yes_hooks: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks))
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=SLOW, timeout=60) as answer:
        next(answer.iter_bytes())
        assert server.stop() == 0
    assert proxy.stop() == 0


def test_a_server_whose_journal_breaks_does_not_exit_with_0(
    processes: Processes, yes_hooks: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks))
    with sqlite3.connect(server.folder / "journal.sqlite") as db:
        db.execute(
            "CREATE TRIGGER broken BEFORE INSERT ON meta BEGIN SELECT RAISE(ABORT, 'x'); END"
        )
    db.close()
    proxy.stop()
    httpx.post(f"{server.url}/stop_engine", timeout=60)
    httpx.post(f"{server.url}/start_engine", timeout=60)
    wait_until(lambda: server.returncode is not None, STOP_GRACE_S, "the server to exit")
    assert server.returncode == 1

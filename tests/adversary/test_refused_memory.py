"""The system refuses memory to a proxy or a server while apps send large requests."""

from __future__ import annotations

import resource
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Process, Processes, wait_until

pytestmark = pytest.mark.slow

SLACK_BYTES = 24 * 2**20
"""Memory that the process may still get. The attack needs more."""
CONFIG = "[upstream]\nhold_s = 1.0\n"


def address_space(process: Process) -> int:
    """Return the size of the process's address space in bytes."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmSize")) * 1024


def ask(proxy: Process, number: int, size: int = 0) -> httpx.Response | None:
    """Send a request of `size` further bytes, and return the response; None if the connection was
    lost."""
    text = f"[[say hi]] {number} " + "x" * size
    body: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": text}]}
    body["stream"] = number % 3 == 0
    try:
        return httpx.post(f"{proxy.url}/v1/chat/completions", json=body, timeout=60)
    except httpx.TransportError:
        return None


def is_whole_or_error(reply: httpx.Response) -> bool:
    """Return whether a response is a whole answer or an error in vLLM's form."""
    if reply.status_code != 200:
        is_json = reply.headers["content-type"].startswith("application/json")
        return is_json and set(reply.json()["error"]) == {"message", "type", "param", "code"}
    return "[DONE]" in reply.text or '"finish_reason":"stop"' in reply.text


@pytest.mark.parametrize("victim", ["proxy", "server"])
def test_apps_get_errors_in_vllms_form_and_a_process_that_died_continues_after_a_restart(
    processes: Processes, yes_hooks: Path, victim: str
) -> None:
    config = processes.folder / "fakevllm.toml"
    config.write_text(CONFIG)
    server = processes.server("--backend", "fake")
    flags = ("--config", str(config), "--hooks", str(yes_hooks), "--n", "4")
    proxy = processes.proxy(server, *flags)
    assert ask(proxy, 1) is not None
    process = {"proxy": proxy, "server": server}[victim]
    limits = resource.prlimit(process.pid, resource.RLIMIT_AS)
    limit = address_space(process) + SLACK_BYTES
    resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limits[1]))
    with ThreadPoolExecutor(12) as threads:
        sending = [
            threads.submit(ask, proxy, 1000 + number, number % 2 * 2**20) for number in range(60)
        ]
        replies = [future.result() for future in sending]
    received = [reply for reply in replies if reply is not None]
    others = [reply for reply in received if not is_whole_or_error(reply)]
    assert not others, [(reply.status_code, reply.text[:200]) for reply in others]
    if process.returncode is None:
        resource.prlimit(process.pid, resource.RLIMIT_AS, limits)
    else:
        process.kill()  # closes the pipe of the dead process
        process.start()
    assert victim == "proxy" or len(received) == len(replies), "the proxy itself has enough memory"

    def is_answered() -> bool:
        reply = ask(proxy, 5000)
        return reply is not None and reply.status_code == 200

    wait_until(is_answered, 60, lambda: f"an answer; the log of the {victim}:\n{process.log}")
    for file in (proxy.folder / "ledger.sqlite", server.folder / "journal.sqlite"):
        with closing(sqlite3.connect(file)) as db:
            assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"

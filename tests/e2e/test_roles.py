"""A test of a proxy whose key has the role of a client.

The proxy may not start the engine, but serves when the engine runs.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx
from swarm_server.team_server import CHAT_BODY, KEYS, TeamServer, write_keys

from tests.e2e.ledgers import wait_for_groups
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Process, Processes, wait_until


def command(proxy: Process, *words: str, name: str) -> subprocess.CompletedProcess[str]:
    """Run a `fakevllm` command for that proxy with the key of a team member."""
    flags = ("--url", proxy.url, "--key", KEYS[name][0])
    return PRELOADED_PYTHON.run(["-m", "fakevllm", *words, *flags], proxy.folder)


def test_a_proxy_with_a_clients_key_says_who_may_start_the_engine_and_then_serves(
    processes: Processes, yes_hooks: Path
) -> None:
    keys = write_keys(processes.folder / "keys")
    server = processes.server("--backend", "fake", "--key-file", str(keys))
    file = processes.folder / "fakevllm.toml"
    file.write_text(f"[swarm]\nkey = '{KEYS['alice'][0]}'\n[policy]\n")
    flags = ("--hooks", str(yes_hooks), "--n", "2", "--config", str(file), "--key-file", str(keys))
    proxy = processes.proxy(server, *flags, wait=False)
    warning = (
        "the proxy's key may not start the engine: have an admin start it, or give an admin's key"
    )
    wait_until(lambda: warning in proxy.log, 30, lambda: proxy.log)
    status = " ".join(command(proxy, "status", name="alice").stdout.split())
    assert "the proxy's key may not start the engine" in status

    refused = command(proxy, "pause", name="alice")
    assert refused.returncode == 2
    assert "/fakevllm/pause is for admins, and the key of alice has the role" in refused.stderr
    assert "paused" in command(proxy, "pause", name="root").stdout
    assert "fanned out" in command(proxy, "resume", name="root").stdout

    TeamServer(server).start_engine()
    proxy.wait_until_healthy()
    bearer = {"Authorization": f"Bearer {KEYS['bob'][0]}"}
    url = f"{proxy.url}/v1/chat/completions"
    assert httpx.post(url, json=CHAT_BODY, headers=bearer, timeout=20).status_code == 200
    assert wait_for_groups(proxy, 1)[0]["num_siblings"] == 2
